//! A fake Kubernetes API server for tests: the API's verbs on any object, with faults on demand; as a server, over real
//! HTTP/1.1 on loopback and on a thread of its own, or without one.
//!
//! It has no schemas, no admission and no authentication. An apply is a merge that creates, and is refused where it
//! would change a field that another manager owns.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod http;
mod patch;
mod store;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Body;
use hyper::{Request, Response};
use serde_json::Value;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use http::Answer;
use store::{Collection, Store};

/// A fault that a request meets instead of its answer, or before it.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A Status with this code.
    Status(u16),
    /// 504, as an API server answers that has not reached the version yet.
    FutureVersion,
    /// 429 with a text body, as API priority and fairness answers.
    TooManyRequests { retry_after: u64 },
    /// The right answer, this much later.
    Delay(Duration),
    /// The right answer, once as many requests as the barrier waits for have come.
    Together(Arc<tokio::sync::Barrier>),
    /// The connection ends in the middle of the answer's body.
    Truncate,
    /// 200 and an ERROR event with code 410, as the watch cache answers. For `watch`.
    GoneEvent,
    /// 200 and an immediate end. For `watch`.
    CloseAtOnce,
}

struct Rule {
    verb: &'static str,
    resource: &'static str,
    /// None: of any name.
    object: Option<&'static str>,
    fault: Fault,
    times: usize,
}

/// Order to the watches that are open now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Run,
    /// Half a line, then the connection breaks.
    Cut,
    /// A clean end.
    End,
    /// An ERROR event with code 410, then a clean end.
    Gone,
    /// Not a byte more; the connection stays open.
    Freeze,
}

/// Makes the answer to a created object from the object.
pub(crate) type Review = Arc<dyn Fn(&Value) -> Value + Send + Sync>;

#[derive(Default)]
pub(crate) struct Shared {
    /// By resource, for objects that are questions: they are answered and not kept.
    reviews: Mutex<BTreeMap<String, Review>>,
    store: Mutex<Store>,
    /// The store's version; watches wait for it.
    version: tokio::sync::watch::Sender<u64>,
    /// Counts up with each order to the watches that are open.
    orders: tokio::sync::watch::Sender<(u64, Order)>,
    rules: Mutex<Vec<Rule>>,
    requests: Mutex<BTreeMap<(String, String), usize>>,
    open_watches: Mutex<BTreeMap<String, usize>>,
}

impl Shared {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap()
    }

    /// Runs `change` on the store and wakes the watches.
    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store();
        let result = change(&mut store);
        self.version.send_replace(store.version());
        result
    }
}

enum Command {
    Down(std::sync::mpsc::SyncSender<()>),
    Up(std::sync::mpsc::SyncSender<()>),
}

/// The objects and the faults; clones share them.
#[derive(Clone, Default)]
pub struct Api {
    shared: Arc<Shared>,
}

/// A running server; ends when dropped.
pub struct ApiServer {
    address: SocketAddr,
    api: Api,
    commands: mpsc::UnboundedSender<Command>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    dir: tempfile::TempDir,
    /// Bound, never listening: keeps the port while the server is down.
    _port: Socket,
}

impl ApiServer {
    pub fn start() -> Self {
        let port = bind("127.0.0.1:0".parse().unwrap());
        let address = port.local_addr().unwrap().as_socket().unwrap();
        let api = Api::default();
        let (commands, received) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let thread = std::thread::spawn({
            let (shared, stop) = (api.shared.clone(), stop.clone());
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(run(address, shared, received, stop));
            }
        });
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\n\
             clusters:\n- name: fake\n  cluster: {{server: \"http://{address}\"}}\n\
             users:\n- name: fake\n  user: {{token: fake}}\n\
             contexts:\n- name: fake\n  context: {{cluster: fake, user: fake, namespace: kube-system}}\n"
        );
        std::fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
        let server = Self { address, api, commands, stop, thread: Some(thread), dir, _port: port };
        server.up();
        server
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A kubeconfig file that names this server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig")
    }

    /// A directory that lives as long as the server.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Refuses connections, and ends those that are open, until `up`.
    pub fn down(&self) {
        self.command(Command::Down);
    }

    pub fn up(&self) {
        self.command(Command::Up);
    }

    fn command(&self, command: impl FnOnce(std::sync::mpsc::SyncSender<()>) -> Command) {
        let (done, wait) = std::sync::mpsc::sync_channel(1);
        self.commands.send(command(done)).expect("the server's thread has ended");
        wait.recv().expect("the server's thread has ended");
    }
}

impl std::ops::Deref for ApiServer {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

impl Api {
    /// Answers a request in the caller's runtime. A watch has a task there.
    pub async fn answer<B: Body<Data = Bytes>>(&self, request: Request<B>) -> Response<Answer> {
        http::answer(request, &self.shared).await
    }

    // The objects, without a request.

    /// Answers created objects of this resource, such as `tokenreviews`, with the result of `answer`.
    pub fn review(&self, resource: &str, answer: impl Fn(&Value) -> Value + Send + Sync + 'static) {
        self.shared.reviews.lock().unwrap().insert(resource.to_owned(), Arc::new(answer));
    }

    /// Creates or replaces the object; `metadata.name` names it.
    pub fn put(&self, collection: &str, object: Value) -> Value {
        let collection = Collection::parse(collection).unwrap();
        self.shared.change(|store| store.put(&collection, object))
    }

    pub fn put_all(&self, collection: &str, objects: impl IntoIterator<Item = Value>) {
        let collection = Collection::parse(collection).unwrap();
        self.shared.change(|store| {
            for object in objects {
                store.put(&collection, object);
            }
        });
    }

    pub fn edit(&self, collection: &str, name: &str, edit: impl FnOnce(&mut Value)) {
        let collection = Collection::parse(collection).unwrap();
        self.shared.change(|store| {
            let mut object = store.get(&collection, name).expect("no such object").as_ref().clone();
            edit(&mut object);
            store.put(&collection, object);
        });
    }

    pub fn remove(&self, collection: &str, name: &str) {
        let collection = Collection::parse(collection).unwrap();
        self.shared.change(|store| store.remove(&collection, name)).expect("no such object");
    }

    pub fn get(&self, collection: &str, name: &str) -> Option<Value> {
        let collection = Collection::parse(collection).unwrap();
        self.shared.store().get(&collection, name).map(|object| object.as_ref().clone())
    }

    pub fn list(&self, collection: &str) -> Vec<Value> {
        let collection = Collection::parse(collection).unwrap();
        self.shared.store().list(&collection).map(|(_, object)| object.as_ref().clone()).collect()
    }

    // Faults.

    /// The next `times` requests that match get `fault`. Verbs: `list` (first pages), `continue` (further pages),
    /// `watch`, `get`, `create`, `update`, `patch`, `delete`, or `*`; `resource` is the plural, or `*`.
    pub fn inject(&self, verb: &'static str, resource: &'static str, fault: Fault, times: usize) {
        self.shared.rules.lock().unwrap().push(Rule { verb, resource, object: None, fault, times });
    }

    /// The same for all requests about one object, until `heal`.
    pub fn inject_for(&self, verb: &'static str, resource: &'static str, object: &'static str, fault: Fault) {
        let rule = Rule { verb, resource, object: Some(object), fault, times: usize::MAX };
        self.shared.rules.lock().unwrap().push(rule);
    }

    /// Reports whether every injected fault was used.
    pub fn faults_are_spent(&self) -> bool {
        self.shared.rules.lock().unwrap().is_empty()
    }

    pub fn heal(&self) {
        self.shared.rules.lock().unwrap().clear();
    }

    /// Breaks the watches that are open in the middle of a line.
    pub fn cut_watches(&self) {
        self.order(Order::Cut);
    }

    /// Ends the watches that are open cleanly.
    pub fn end_watches(&self) {
        self.order(Order::End);
    }

    /// Sends the watches that are open an ERROR event with code 410, and ends them.
    pub fn expire_watches(&self) {
        self.order(Order::Gone);
    }

    /// Freezes the watches that are open: they send nothing more and stay open. Later ones work.
    pub fn freeze_watches(&self) {
        self.order(Order::Freeze);
    }

    /// Forgets the changes until now: a watch from before gets 410.
    pub fn compact(&self) {
        self.shared.store().compact();
    }

    fn order(&self, order: Order) {
        self.shared.orders.send_modify(|(number, current)| (*number, *current) = (*number + 1, order));
    }

    // Requests so far.

    /// Requests with this verb to this path (without its query). Further pages count as `continue`.
    pub fn requests(&self, verb: &str, path: &str) -> usize {
        self.shared.requests.lock().unwrap().get(&(verb.to_owned(), path.to_owned())).copied().unwrap_or(0)
    }

    /// Writes (create, update, patch, delete) to paths that contain `part`.
    pub fn writes(&self, part: &str) -> usize {
        let requests = self.shared.requests.lock().unwrap();
        let write = |verb: &str| matches!(verb, "create" | "update" | "patch" | "delete");
        requests.iter().filter(|((verb, path), _)| write(verb) && path.contains(part)).map(|(_, n)| n).sum()
    }

    /// Every request until now, for messages of assertions.
    pub fn all_requests(&self) -> BTreeMap<(String, String), usize> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// Watches open now on the collection with this path.
    pub fn open_watches(&self, path: &str) -> usize {
        self.shared.open_watches.lock().unwrap().get(path).copied().unwrap_or(0)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn bind(address: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.bind(&address.into()).unwrap();
    socket
}

async fn run(
    address: SocketAddr,
    shared: Arc<Shared>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    stop: CancellationToken,
) {
    let mut listener: Option<TcpListener> = None;
    let mut connections = stop.child_token();
    loop {
        let accept = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            command = commands.recv() => match command {
                None => return,
                Some(Command::Up(done)) => {
                    if listener.is_none() {
                        let socket = bind(address);
                        socket.listen(1024).unwrap();
                        listener = Some(TcpListener::from_std(socket.into()).unwrap());
                    }
                    let _ = done.send(());
                }
                Some(Command::Down(done)) => {
                    listener = None;
                    connections.cancel();
                    connections = stop.child_token();
                    let _ = done.send(());
                }
            },
            Ok((stream, _)) = accept => {
                tokio::spawn(http::serve(stream, shared.clone(), connections.clone()));
            }
        }
    }
}

/// Waits until `condition` returns something.
///
/// # Panics
/// With `what` after two minutes; nothing here takes more than half a minute on an idle machine.
pub async fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(result) = condition() {
            return result;
        }
        assert!(tokio::time::Instant::now() < deadline, "not within 120 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
