//! The agent's listeners, in one table: opened at the start or taken from the agent before, and handed over to a successor.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tunnel_link::relay::{listen, prepare_socket};
use tunnel_runtime::config::BindError;
use tunnel_runtime::log_once::LogOnce;
use tunnel_runtime::takeover::Copies;

use crate::config::{Config, Listen};
use crate::takeover::Predecessor;

/// The name of all listeners that lead to the cloud.
pub(crate) const OUTBOUND: &str = "outbound";
/// Retry interval for an address that another agent holds.
const RETRY: Duration = Duration::from_secs(1);

/// A listener of this agent.
#[derive(Debug)]
pub(crate) struct Listener {
    /// Its name among the sockets that a successor gets.
    name: &'static str,
    flag: &'static str,
    address: SocketAddr,
    /// None while the agent before keeps the address.
    socket: Option<TcpListener>,
    copies: Arc<Copies>,
}

/// All listeners.
#[derive(Debug)]
pub(crate) struct Listeners {
    /// None: it is off.
    pub(crate) admin: Option<Listener>,
    /// Those that lead to the cloud.
    pub(crate) outbound: Vec<(Listen, Listener)>,
    /// The sockets for a successor.
    pub(crate) copies: Arc<Copies>,
}

impl Listeners {
    /// Opens all listeners.
    ///
    /// # Errors
    /// An address cannot be listened on. In use by the agent before, it is an error for the admin port only: some
    /// versions keep the others.
    pub(crate) async fn open(config: &Config, before: &mut Option<Predecessor>) -> Result<Self, BindError> {
        let copies = Arc::<Copies>::default();
        let listener =
            |name, flag, address| Listener { name, flag, address, socket: None, copies: copies.clone() };
        let mut admin = None;
        if let Some(address) = config.given.admin_address {
            let mut listener = listener("admin", "--admin-address", address);
            listener.open(before).map_err(|error| BindError::new(listener.flag, address, error))?;
            admin = Some(listener);
        }
        let mut outbound = Vec::new();
        for listen in &config.outbound {
            let mut listener = listener(OUTBOUND, listen.flag(), listen.address);
            match listener.open(before) {
                Err(error) if before.is_some() && error.kind() == io::ErrorKind::AddrInUse => {
                    let (flag, address) = (listener.flag, listener.address);
                    tracing::warn!(flag, %address, "failed to listen beside the agent before, waiting for its end");
                }
                // A network plugin may give the node this address later. The node is repaired over the sessions, which must not wait.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
                opened => opened.map_err(|error| BindError::new(listener.flag, listener.address, error))?,
            }
            outbound.push((listen.clone(), listener));
        }
        Ok(Self { admin, outbound, copies })
    }
}

impl Listener {
    /// Sets the options that accepted sockets inherit.
    fn prepare(&self, socket: &impl AsFd) {
        if self.name == OUTBOUND {
            prepare_socket(socket);
        }
    }

    fn open(&mut self, before: &mut Option<Predecessor>) -> io::Result<()> {
        let taken = before.as_mut().and_then(|before| before.listener(self.name, |at| at == self.address));
        let socket = match taken {
            Some(taken) => TcpListener::from_std(taken).inspect(|taken| self.prepare(taken)),
            None => listen(self.address, |socket| self.prepare(socket)),
        }?;
        self.copies.add(self.name, self.address, socket.as_fd().try_clone_to_owned()?);
        self.socket = Some(socket);
        Ok(())
    }

    /// Returns the socket once it is bound.
    pub(crate) async fn socket(mut self) -> TcpListener {
        let (flag, address, mut failing) = (self.flag, self.address, LogOnce::default());
        loop {
            if let Some(socket) = self.socket {
                return socket;
            }
            match self.open(&mut None) {
                Ok(()) => tracing::info!(flag, %address, "listening"),
                Err(error) => {
                    if failing.is_new(&error) {
                        tracing::warn!(flag, %address, %error, "failed to listen, retrying");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_runtime::takeover::{self, Successors as _};

    use super::*;
    use crate::runtime::of_flags;

    #[tokio::test]
    async fn an_address_that_the_node_does_not_have_yet_keeps_only_its_listener_waiting() {
        let flags = [
            "--server=a:1",
            "--admin-address=0",
            "--connect-address=192.0.2.7:10281",
            "--connect-clients=192.0.2.0/24",
        ];
        let config = of_flags(&flags).config;
        let listeners = Listeners::open(&config, &mut None).await.unwrap();
        assert_eq!(listeners.outbound.len(), 1);
        assert!(listeners.outbound.iter().all(|(_, listener)| listener.socket.is_none()));
    }

    #[tokio::test]
    async fn what_the_agent_before_has_is_taken_or_waited_for() {
        let state = tempfile::tempdir().unwrap();
        let (passed, kept) = (bind().await, bind().await);
        let (passed_at, kept_at) = (passed.local_addr().unwrap(), kept.local_addr().unwrap());
        let flags = [
            "--server=a:1".to_owned(),
            "--admin-address=0".to_owned(),
            format!("--connect-address={passed_at}"),
            format!("--forward={kept_at}=prometheus.monitoring:9090"),
        ];
        let config = of_flags(&flags.each_ref().map(String::as_str)).config;
        assert!(Listeners::open(&config, &mut None).await.is_err(), "nothing is handed over");
        let copies = Copies::default();
        copies.add("outbound", passed_at, passed.as_fd().try_clone_to_owned().unwrap());
        let waiting = takeover::Listener::bind(&takeover::socket_path(state.path())).unwrap();
        let greet = async {
            let mut stream = waiting.accept().await.unwrap();
            copies.greet(&mut *stream, "1.2.3", serde_json::json!({"attached": []})).await.unwrap();
            stream
        };
        let (_first, mut before) = tokio::join!(greet, Predecessor::find(state.path()));
        let mut listeners = Listeners::open(&config, &mut before).await.unwrap();
        let is_bound: Vec<_> = listeners.outbound.iter().map(|(_, now)| now.socket.is_some()).collect();
        assert_eq!(is_bound, [true, false]);
        assert!(listeners.copies.get("outbound", kept_at).is_none());
        drop(kept);
        let late = listeners.outbound.remove(1).1.socket().await;
        assert_eq!(late.local_addr().unwrap(), kept_at);
        assert!(listeners.copies.get("outbound", kept_at).is_some(), "a successor gets it too");
    }

    async fn bind() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }
}
