//! Objects kept up to date from the events of a watch. A list takes effect once it is complete.

use std::collections::BTreeMap;

use futures_util::{Stream, StreamExt as _};
use kube::ResourceExt;
use kube::runtime::watcher::Event;

/// Followed objects of one namespace, by name; or a single one.
#[derive(Debug)]
pub struct Followed<K> {
    pub objects: BTreeMap<String, K>,
    /// True once a complete list has arrived.
    pub known: bool,
    listed: BTreeMap<String, K>,
}

impl<K> Default for Followed<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), known: false, listed: BTreeMap::new() }
    }
}

impl<K: ResourceExt> Followed<K> {
    /// Returns the object where only one is followed. None if it does not exist or is not known yet.
    pub fn only(&self) -> Option<&K> {
        self.objects.values().next()
    }

    pub fn apply(&mut self, event: Event<K>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(object) => drop(self.listed.insert(object.name_any(), object)),
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listed);
                self.known = true;
            }
            Event::Apply(object) => drop(self.objects.insert(object.name_any(), object)),
            Event::Delete(object) => drop(self.objects.remove(&object.name_any())),
        }
    }

    /// Applies events, at least one, until the objects are known. None: there are no more events.
    pub async fn change(&mut self, events: &mut (impl Stream<Item = Event<K>> + Unpin)) -> Option<()> {
        loop {
            self.apply(events.next().await?);
            if self.known {
                return Some(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;

    use super::*;

    #[test]
    fn they_are_replaced_when_a_list_is_complete() {
        let service = |name: &str| {
            let mut service = Service::default();
            service.metadata.name = Some(name.to_owned());
            service
        };
        let mut followed = Followed::default();
        followed.apply(Event::Init);
        followed.apply(Event::InitApply(service("a")));
        assert!(followed.only().is_none() && !followed.known);
        followed.apply(Event::InitDone);
        assert_eq!((followed.objects.len(), followed.known), (1, true));
        followed.apply(Event::Apply(service("b")));
        followed.apply(Event::Delete(service("a")));
        assert_eq!(followed.objects.keys().collect::<Vec<_>>(), ["b"]);
        followed.apply(Event::Init);
        followed.apply(Event::InitApply(service("c")));
        assert_eq!(followed.objects.keys().collect::<Vec<_>>(), ["b"]);
        followed.apply(Event::InitDone);
        assert_eq!(followed.objects.keys().collect::<Vec<_>>(), ["c"]);
    }
}
