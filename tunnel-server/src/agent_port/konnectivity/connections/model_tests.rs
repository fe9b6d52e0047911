//! An agent that sends any packet at any time, to clients that come and go.

use proptest::prelude::*;
use proptest::sample::Index;
use tokio::time::sleep;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Dial,
    /// A client gives up a dial.
    GiveUp(Index),
    /// The agent answers a dial, or one that nobody has made, with the number of a connection.
    Answer(Index, bool, i64),
    Refuse(Index),
    Data(i64, usize),
    Close(i64),
    Other,
    ClientTakes(Index),
    ClientEnds(Index),
    AgentReads,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    // Few numbers: an agent may use one twice.
    let connect_id = || 1i64..6;
    let index = any::<Index>;
    prop_oneof![
        3 => Just(Step::Dial),
        1 => index().prop_map(Step::GiveUp),
        4 => (index(), prop::bool::weighted(0.2), connect_id())
            .prop_map(|(dial, unasked, id)| Step::Answer(dial, unasked, id)),
        1 => index().prop_map(Step::Refuse),
        6 => (connect_id(), prop_oneof![Just(0), 1usize..100, Just(WAITING as usize / 2)])
            .prop_map(|(id, bytes)| Step::Data(id, bytes)),
        2 => connect_id().prop_map(Step::Close),
        1 => Just(Step::Other),
        3 => index().prop_map(Step::ClientTakes),
        2 => index().prop_map(Step::ClientEnds),
        3 => Just(Step::AgentReads),
        1 => (0u64..3_000).prop_map(Step::Pass),
    ]
}

struct Client {
    opened: Opened,
    /// Number of the last packet that it has got.
    last: Option<u64>,
}

impl Client {
    /// Takes what has arrived next, and returns its size. None if nothing has.
    fn take(&mut self) -> Option<usize> {
        match self.opened.arrived.try_recv() {
            Ok(Arrived::Data(data, _room)) => {
                let head: [u8; 16] = data[..16].try_into().unwrap();
                let (id, number) = head.split_at(8);
                assert_eq!(i64::from_be_bytes(id.try_into().unwrap()), self.opened.connect_id);
                let number = Some(u64::from_be_bytes(number.try_into().unwrap()));
                assert!(number > self.last, "{number:?} after {:?}", self.last);
                self.last = number;
                Some(data.len())
            }
            Ok(Arrived::Closed(_)) => Some(0),
            Err(_) => None,
        }
    }
}

struct Model {
    connections: Arc<AgentConnections>,
    from_agent: mpsc::UnboundedSender<Packet>,
    to_agent: mpsc::Receiver<Result<Packet, Status>>,
    dials: Vec<(i64, oneshot::Receiver<Result<Opened, String>>)>,
    clients: Vec<Client>,
    sent: u64,
}

impl Model {
    fn new() -> Self {
        let (packets, to_agent) = mpsc::channel(4);
        let (from_agent, mut taken) = mpsc::unbounded_channel();
        let connections = Arc::new(AgentConnections::new(packets));
        let reading = connections.clone();
        tokio::spawn(async move {
            while let Some(packet) = taken.recv().await {
                reading.take(packet).await;
            }
        });
        Self { connections, from_agent, to_agent, dials: Vec::new(), clients: Vec::new(), sent: 0 }
    }

    fn send(&self, packet: Packet) {
        self.from_agent.send(packet).unwrap();
    }

    fn end(&self, client: Client) {
        let (connections, connect_id) = (self.connections.clone(), client.opened.connect_id);
        drop(client);
        tokio::spawn(async move { connections.close(connect_id).await });
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Dial => self.dials.push(self.connections.dial()),
            Step::GiveUp(dial) if !self.dials.is_empty() => {
                let (random, answer) = self.dials.swap_remove(dial.index(self.dials.len()));
                drop(answer);
                self.connections.give_up(random);
            }
            Step::Answer(_, true, connect_id) => self.send(Packet::dial_response(-1, Ok(*connect_id))),
            Step::Answer(dial, false, connect_id) if !self.dials.is_empty() => {
                let (random, _) = self.dials[dial.index(self.dials.len())];
                self.send(Packet::dial_response(random, Ok(*connect_id)));
            }
            Step::Refuse(dial) if !self.dials.is_empty() => {
                let (random, _) = self.dials[dial.index(self.dials.len())];
                self.send(Packet::dial_response(random, Err("connection refused".to_owned())));
            }
            Step::Data(connect_id, bytes) => {
                self.sent += 1;
                let mut data = [connect_id.to_be_bytes(), self.sent.to_be_bytes()].concat();
                data.resize(data.len() + *bytes, 0);
                self.send(Packet::data(*connect_id, data.into()));
            }
            Step::Close(connect_id) => self.send(Packet::close_response(*connect_id, String::new())),
            Step::Other => self.send(Packet::close_request(1)),
            Step::ClientTakes(client) if !self.clients.is_empty() => {
                let client = client.index(self.clients.len());
                let _ = self.clients[client].take();
            }
            Step::ClientEnds(client) if !self.clients.is_empty() => {
                let client = self.clients.swap_remove(client.index(self.clients.len()));
                self.end(client);
            }
            Step::AgentReads => drop(self.to_agent.try_recv()),
            _ => {}
        }
    }

    async fn settle(&mut self) {
        sleep(Duration::from_millis(1)).await;
        for (random, mut answer) in std::mem::take(&mut self.dials) {
            match answer.try_recv() {
                Ok(Ok(opened)) => self.clients.push(Client { opened, last: None }),
                Ok(Err(_)) => {}
                Err(oneshot::error::TryRecvError::Empty) => self.dials.push((random, answer)),
                Err(oneshot::error::TryRecvError::Closed) => panic!("dial {random} is forgotten"),
            }
        }
        let tables = self.connections.tables.lock();
        let known = |connect_id| self.clients.iter().any(|client| client.opened.connect_id == connect_id);
        assert!(tables.open.keys().all(|connect_id| known(*connect_id)), "a connection without a client");
    }

    /// All clients leave, and the agent reads: nothing may be left.
    async fn end_all(mut self) {
        for mut client in std::mem::take(&mut self.clients) {
            let waiting: usize = std::iter::from_fn(|| client.take()).sum();
            assert!(waiting <= WAITING as usize, "{waiting} bytes wait for a client");
            self.end(client);
        }
        for (random, answer) in std::mem::take(&mut self.dials) {
            drop(answer);
            self.connections.give_up(random);
        }
        // A packet that waits for a client is then dropped.
        while tokio::time::timeout(STALL * 2, self.to_agent.recv()).await.is_ok() {}
        assert!(self.connections.is_empty(), "{:?}", self.connections.tables);
        assert_eq!(self.connections.cuts.available_permits(), MOST_CUTS);
    }
}

proptest! {
    /// Whatever the agent sends and the clients do, data reaches only the connection that it names, in order; what waits
    /// is bounded; and nothing is left of what has ended.
    #[test]
    fn an_agent_may_send_anything(steps in prop::collection::vec(step(), 0..120)) {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap().block_on(async {
            let mut model = Model::new();
            for step in steps {
                match step {
                    Step::Pass(millis) => sleep(Duration::from_millis(millis)).await,
                    step => model.step(&step),
                }
                model.settle().await;
            }
            model.end_all().await;
        });
    }
}
