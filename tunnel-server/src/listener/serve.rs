//! A listener accepts a connection, finds its node and target in a way of its own (the trait [`Listener`]), and relays.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpStream;
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::end_on_drop;
use tunnel_routing::Router;
use tunnel_runtime::accept::Gated;

use super::access_log::{AccessLogGuard, over_limit, turned_away};
use super::context::{Failed, ListenerContext, OpenError, OpenRequest};
use super::front::Front;
use super::way::Way;
use crate::admission::{Share, Shares, source_key};
use crate::metrics::Permit;

/// A kind of listener, which finds the node of each accepted connection.
pub(crate) trait Listener: Send + Sync + 'static {
    /// True if `open` waits for the client, which then needs a place first.
    const READS: bool = true;

    /// The listener's name in logs and metrics.
    fn name(&self) -> &'static str;

    /// Finds the destination that the client wants to reach, and corrects what is known of the client.
    fn open(
        &self,
        socket: &mut TcpStream,
        client: &mut Client,
        router: &Router,
    ) -> impl Future<Output = Result<Opened, OpenError>> + Send;
}

/// The client of a connection.
pub(crate) struct Client {
    /// For logs; at first what accept(2) returned.
    pub(crate) address: SocketAddr,
    /// The source that its connections count as.
    pub(crate) source: IpAddr,
}

/// Result of [`Listener::open`].
pub(crate) enum Opened {
    /// The connection is relayed to one node, byte by byte; with a permit as long as that holds.
    Relayed(OpenRequest, Option<Arc<dyn Permit>>),
    /// This server answers the client, and each request names its own node.
    Served {
        front: Arc<Front>,
        /// Bytes that were already read from the client.
        prefix: Bytes,
    },
}

/// Serves a listener until the drain starts. `shares` bounds its connections, for as long as they last. Accepted sockets
/// have inherited the options of [`prepare_socket`](tunnel_link::relay::prepare_socket): after any failure the client sees a
/// reset, not an end of file.
pub(crate) async fn serve<D: Listener>(
    listener: D,
    mut gated: Gated,
    context: ListenerContext,
    shares: Shares,
) {
    let name = listener.name();
    let listener = Arc::new(listener);
    context.metrics.listener(name);
    loop {
        let (socket, client) = tokio::select! {
            biased;
            () = context.drain.shutdown().draining() => return,
            accepted = gated.accept(name) => accepted,
        };
        let place = match D::READS.then(|| shares.admit_unauthenticated(client.ip())).transpose() {
            Ok(place) => place,
            Err(full) => {
                over_limit(&context.metrics, name, client, &full);
                context.metrics.turned_away(name);
                // Dropping it resets it: the client could take an end of file for an answer.
                continue;
            }
        };
        let (listener, shares, with) = (listener.clone(), shares.clone(), context.clone());
        let receive = move |socket| receive(listener, socket, client, with, shares, place);
        if D::READS {
            context.serve_apart(socket, receive);
        } else {
            context.drain.spawn(receive(socket));
        }
    }
}

/// Handles one accepted connection until it ends.
pub(crate) async fn receive<D: Listener>(
    listener: Arc<D>,
    mut socket: TcpStream,
    accepted: SocketAddr,
    context: ListenerContext,
    shares: Shares,
    mut place: Option<Share>,
) {
    let mut client = Client { address: accepted, source: source_key(accepted.ip()) };
    let opened = listener.open(&mut socket, &mut client, &context.router).await;
    let Client { address: client, source } = client;
    let (request, permit) = match opened {
        Ok(Opened::Relayed(request, permit)) => (request, permit),
        Ok(Opened::Served { front, prefix }) => {
            // Boxed: otherwise relayed connections would hold its memory too.
            let served = Box::pin(front.serve(socket, prefix, client, &context, &shares, place));
            if let Err(error) = served.await {
                turned_away(&context.metrics, listener.name(), client, None, &error);
            }
            return;
        }
        // A reset could arrive before the self-test's connect() has returned.
        Err(OpenError::SelfTest) => return end_on_drop(&socket),
        Err(error) => return turned_away(&context.metrics, listener.name(), client, None, &error),
    };
    if let Some(place) = &mut place {
        place.known();
    }
    let mut record = AccessLogGuard::new(listener.name(), client, &request, &context);
    if let Some(permit) = permit {
        record.admitted_by(permit);
    }
    let place = place.map_or_else(|| shares.admit_as(source), Ok);
    let way = match Way::find(&context, &request, client, place, &mut record).await {
        Ok(way) => way,
        Err(failed) => return record.finish(&Err(failed)),
    };
    // Moves from this thread to the one that owns the link, which relays both directions.
    let worker = way.link().worker.clone();
    match socket.into_std() {
        Ok(socket) => {
            worker.spawn(relay(socket, request, way, record));
        }
        Err(error) => record.end(Outcome::ClientReset, &error),
    }
}

#[expect(clippy::manual_async_fn, reason = "an async fn's future has room for each argument twice")]
fn relay(
    socket: std::net::TcpStream,
    request: OpenRequest,
    mut way: Way,
    record: AccessLogGuard,
) -> impl Future<Output = ()> + Send {
    async move {
        let mut socket = match TcpStream::from_std(socket) {
            Ok(socket) => socket,
            Err(error) => return record.end(Outcome::ClientReset, &error),
        };
        let (abort, traffic) = record.relaying(Some(way.link()), way.relayed());
        let ended = {
            let over = way.link().over.clone();
            let connected = |took| record.dialled(took);
            let mut relaying = std::pin::pin!(async {
                let pending = way.ask(request.target).await?;
                let on = way.on();
                let (mut send, answer) = pending.answer(on, request.target, connected);
                on.relay(&abort, &traffic).run(&mut socket, request.prefix, &mut send, answer).await
            });
            record.until_over(&over, relaying.as_mut()).await
        };
        record.finish(&ended.map_err(|error| Failed::of(&error)));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;
    use tokio::task::JoinHandle;
    use tokio_util::task::AbortOnDropHandle;
    use tunnel_runtime::accept::Gate;
    use tunnel_runtime::lifecycle::Drained;

    use super::*;
    use crate::session::Workers;

    pub(crate) fn size_of_future<A, B, C, D, F>(_: fn(A, B, C, D) -> F) -> usize {
        size_of::<F>()
    }

    /// Every connection holds this much memory until it ends. Moving a future into another one doubles it, which this
    /// test detects. Measured: 2,688 bytes, 3,000 through the https listener.
    #[test]
    fn the_future_of_a_connection_stays_small() {
        let size = size_of_future(relay);
        assert!(size <= 3112, "{size}");
    }

    /// Tells on which thread it is opened.
    struct Opening<const READS: bool>(mpsc::UnboundedSender<String>);

    impl<const READS: bool> Listener for Opening<READS> {
        const READS: bool = READS;

        fn name(&self) -> &'static str {
            "test"
        }

        async fn open(&self, _: &mut TcpStream, _: &mut Client, _: &Router) -> Result<Opened, OpenError> {
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            self.0.send(thread).unwrap();
            Err(OpenError::Client("a test".to_owned()))
        }
    }

    async fn thread_of<const READS: bool>() -> String {
        let (workers, _threads) = Workers::start(1).unwrap();
        let context = ListenerContext { workers, ..ListenerContext::without_nodes() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (opened, mut thread) = mpsc::unbounded_channel();
        let gated = Gate::new(true).guard(listener);
        let serving = serve(Opening::<READS>(opened), gated, context, Shares::new(10));
        let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
        let _client = TcpStream::connect(address).await.unwrap();
        thread.recv().await.unwrap()
    }

    #[tokio::test]
    async fn what_a_client_sends_is_not_read_on_the_accepting_thread() {
        assert_eq!(thread_of::<true>().await, "handshake-0");
        assert_ne!(thread_of::<false>().await, "handshake-0");
    }

    /// Counts those that it opens.
    struct Panicking(Arc<AtomicU32>);

    impl Listener for Panicking {
        fn name(&self) -> &'static str {
            "test"
        }

        async fn open(&self, _: &mut TcpStream, _: &mut Client, _: &Router) -> Result<Opened, OpenError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("a test")
        }
    }

    async fn expect_drained(context: &ListenerContext) {
        let drained = context.drain.finish(Duration::from_secs(10), pending()).await;
        assert_eq!(drained, Drained::Complete, "the server's stop waits for a task that is gone");
    }

    #[tokio::test]
    async fn a_panic_before_the_node_is_known_frees_the_places() {
        let context = ListenerContext::without_nodes();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shares = Shares::new(1).with_unauthenticated(&Arc::new(Shares::new(1)));
        let (opened, gated) = (Arc::<AtomicU32>::default(), Gate::new(true).guard(listener));
        let serving = serve(Panicking(opened.clone()), gated, context.clone(), shares);
        let _serving = AbortOnDropHandle::new(tokio::spawn(serving));
        for client in 1..=3 {
            let mut socket = TcpStream::connect(address).await.unwrap();
            assert_eq!(socket.read(&mut [0]).await.unwrap_or(0), 0, "it is answered");
            assert_eq!(opened.load(Ordering::Relaxed), client, "the one before has its place for ever");
        }
        expect_drained(&context).await;
    }

    #[tokio::test]
    async fn a_panic_during_a_relay_frees_the_place_and_is_counted() {
        let (context, shares) = (ListenerContext::without_nodes(), Shares::new(1));
        let client: SocketAddr = "127.0.0.1:40000".parse().unwrap();
        let request = OpenRequest::new("edge-1".parse().unwrap(), client);
        let mut record = AccessLogGuard::new("test", client, &request, &context);
        record.hold(shares.admit(client.ip()).unwrap());
        assert!(shares.admit(client.ip()).is_err() && context.metrics.active_at("test") == 1);
        let relaying: JoinHandle<()> = tokio::spawn(async move {
            let _record = record;
            panic!("a test")
        });
        assert!(relaying.await.unwrap_err().is_panic());
        assert!(shares.admit(client.ip()).is_ok() && context.metrics.live.all().is_empty());
        assert_eq!((context.metrics.active_at("test"), context.metrics.ended_at("test")), (0, 1));
        expect_drained(&context).await;
    }
}
