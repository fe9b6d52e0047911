//! Tells when this host's addresses change, by rtnetlink(7).

use std::fmt;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use rtnetlink::MulticastGroup;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// Changes come in bursts: an interface goes down with all of its addresses.
const SETTLE: Duration = Duration::from_millis(20);

/// A subscription to changes of addresses, of both families. Needs no privilege.
pub struct AddressChanges {
    messages: Pin<Box<dyn Stream<Item = ()> + Send>>,
    _connection: AbortOnDropHandle<()>,
}

/// The kernel has ended the subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel has ended the subscription to address changes")]
pub struct Ended;

impl AddressChanges {
    /// Changes from now on. Needs a tokio runtime.
    ///
    /// # Errors
    /// There is no netlink socket to be had.
    pub fn subscribe() -> io::Result<Self> {
        let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, _handle, messages) = rtnetlink::new_multicast_connection(&groups)?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        Ok(Self { messages: Box::pin(messages.map(drop)), _connection: connection })
    }

    /// Waits for a change, but no longer than this: a burst of changes may overflow the socket. Then waits until it is
    /// quiet for a moment; bounded, so that a flapping interface does not hold up the caller.
    ///
    /// # Errors
    /// There will be no more.
    pub async fn next(&mut self, at_most: Duration) -> Result<(), Ended> {
        match timeout(at_most, self.messages.next()).await {
            Err(_) => Ok(()),
            Ok(None) => Err(Ended),
            Ok(Some(())) => {
                let burst = async { while let Ok(Some(())) = timeout(SETTLE, self.messages.next()).await {} };
                drop(timeout(SETTLE * 10, burst).await);
                Ok(())
            }
        }
    }
}

impl fmt::Debug for AddressChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AddressChanges")
    }
}
