//! Objects kept up to date from the events of a watch. A list takes effect once it is complete.

use std::collections::BTreeMap;

use kube::ResourceExt;
use kube::runtime::watcher::Event;

/// One followed object.
#[derive(Debug)]
pub struct Followed<K> {
    /// None if it does not exist or is not known yet.
    pub object: Option<K>,
    /// True once a list has shown that the object exists or does not.
    pub known: bool,
    listed: Option<K>,
}

impl<K> Default for Followed<K> {
    fn default() -> Self {
        Self { object: None, known: false, listed: None }
    }
}

impl<K> Followed<K> {
    pub fn apply(&mut self, event: Event<K>) {
        match event {
            Event::Init => self.listed = None,
            Event::InitApply(object) => self.listed = Some(object),
            Event::InitDone => {
                self.object = self.listed.take();
                self.known = true;
            }
            Event::Apply(object) => self.object = Some(object),
            Event::Delete(_) => self.object = None,
        }
    }
}

/// Followed objects of one namespace, by name.
#[derive(Debug)]
pub struct FollowedSet<K> {
    pub objects: BTreeMap<String, K>,
    /// True once a complete list has arrived.
    pub known: bool,
    listed: BTreeMap<String, K>,
}

impl<K> Default for FollowedSet<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), known: false, listed: BTreeMap::new() }
    }
}

impl<K: ResourceExt> FollowedSet<K> {
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
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;

    use super::*;

    #[test]
    fn an_object_is_replaced_when_a_list_is_complete() {
        let mut followed = Followed::default();
        followed.apply(Event::Init);
        followed.apply(Event::InitApply(1));
        assert_eq!((followed.object, followed.known), (None, false));
        followed.apply(Event::InitDone);
        assert_eq!((followed.object, followed.known), (Some(1), true));
        followed.apply(Event::Apply(2));
        assert_eq!(followed.object, Some(2));
        // A second list, which is empty.
        followed.apply(Event::Init);
        assert_eq!(followed.object, Some(2));
        followed.apply(Event::InitDone);
        assert_eq!((followed.object, followed.known), (None, true));
    }

    #[test]
    fn a_set_is_replaced_when_a_list_is_complete() {
        let service = |name: &str| {
            let mut service = Service::default();
            service.metadata.name = Some(name.to_owned());
            service
        };
        let mut set = FollowedSet::default();
        set.apply(Event::Init);
        set.apply(Event::InitApply(service("a")));
        assert_eq!((set.objects.len(), set.known), (0, false));
        set.apply(Event::InitDone);
        assert_eq!((set.objects.len(), set.known), (1, true));
        set.apply(Event::Apply(service("b")));
        set.apply(Event::Delete(service("a")));
        assert_eq!(set.objects.keys().collect::<Vec<_>>(), ["b"]);
        set.apply(Event::Init);
        set.apply(Event::InitApply(service("c")));
        assert_eq!(set.objects.keys().collect::<Vec<_>>(), ["b"]);
        set.apply(Event::InitDone);
        assert_eq!(set.objects.keys().collect::<Vec<_>>(), ["c"]);
    }
}
