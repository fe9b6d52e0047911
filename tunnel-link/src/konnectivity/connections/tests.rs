//! Packets of a caller, and targets that echo, stall, are slow or wait.

use bytes::Bytes;
use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::*;

const BOUNDS: Bounds = Bounds {
    connections: 6,
    one: 1000,
    patience: Duration::from_secs(2),
    callers_share: false,
    stalled: "stalled",
    linger: Duration::from_secs(60),
    early: "too early",
};

/// Limit for all connections together.
const ALL: usize = 3000;

/// Size of a piece: one may wait, two may not.
const PIECE: usize = 600;

/// `echo:1` echoes, `sends:1` sends without an end, `stalls:1` reads nothing, `slow:1` takes a piece just in time, `waits:1` does not answer its dial;
/// others are refused.
struct Dialler;

enum Target {
    Echoes,
    Sends,
    Stalls,
    IsSlow,
}

#[tonic::async_trait]
impl Dial for Dialler {
    type Connected = Target;

    async fn dial(&self, address: &str, gone: &Gone) -> Result<Target, String> {
        match address {
            "echo:1" => Ok(Target::Echoes),
            "sends:1" => Ok(Target::Sends),
            "stalls:1" => Ok(Target::Stalls),
            "slow:1" => Ok(Target::IsSlow),
            "waits:1" => {
                gone.cut().await;
                Err("nobody waits".to_owned())
            }
            _ => Err("connection refused".to_owned()),
        }
    }

    async fn relay(
        &self,
        target: Target,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        gone: &Gone,
    ) -> Result<(), String> {
        match target {
            Target::Echoes => tokio::select! {
                copied = tokio::io::copy(inbox, outbox) => copied.map(drop).map_err(|error| error.to_string()),
                () = gone.wait() => Err("gone".to_owned()),
            },
            Target::Sends => {
                let mut zeros = tokio::io::repeat(0);
                tokio::select! {
                    copied = tokio::io::copy(&mut zeros, outbox) => {
                        copied.map(drop).map_err(|error| error.to_string())
                    }
                    () = gone.wait() => Err("gone".to_owned()),
                }
            }
            Target::Stalls => {
                gone.wait().await;
                // The waiting data is still there.
                let _ = timeout(Duration::ZERO, inbox.read_u8()).await;
                Err("gone".to_owned())
            }
            Target::IsSlow => tokio::select! {
                () = take_slowly(inbox) => Ok(()),
                () = gone.wait() => Err("gone".to_owned()),
            },
        }
    }
}

async fn take_slowly(inbox: &mut Inbox) {
    let mut piece = [0; PIECE];
    loop {
        tokio::time::sleep(BOUNDS.patience * 3 / 4).await;
        if inbox.read_exact(&mut piece).await.is_err() {
            return;
        }
    }
}

struct Caller {
    packets: mpsc::Sender<Result<Packet, Status>>,
    answers: mpsc::Receiver<Result<Packet, Status>>,
    _task: AbortOnDropHandle<Result<(), Status>>,
}

impl Caller {
    fn new() -> Self {
        Self::sharing(&Arc::new(Room::new(ALL)))
    }

    fn sharing(room: &Arc<Room>) -> Self {
        Self::within(BOUNDS, room)
    }

    /// Creates a caller on a stream shared with other callers.
    fn beside_others() -> Self {
        Self::within(Bounds { callers_share: true, ..BOUNDS }, &Arc::new(Room::new(ALL)))
    }

    fn within(bounds: Bounds, room: &Arc<Room>) -> Self {
        let (packets, stream) = mpsc::channel(1);
        let (sender, answers) = mpsc::channel(4);
        let stream =
            futures_util::stream::unfold(stream, |mut stream| async { Some((stream.recv().await?, stream)) });
        let numbers = Arc::new(AtomicI64::new(100));
        let connections = Connections::new(Arc::new(Dialler), bounds, room.clone(), numbers, sender);
        let task = tokio::spawn(connections.serve(Box::pin(stream)));
        Self { packets, answers, _task: AbortOnDropHandle::new(task) }
    }

    async fn send(&self, packet: Packet) {
        self.packets.send(Ok(packet)).await.unwrap();
    }

    async fn send_pieces(&self, connect_id: i64, count: usize) {
        for _ in 0..count {
            self.send(Packet::data(connect_id, Bytes::from_static(&[0; PIECE]))).await;
        }
    }

    async fn next(&mut self) -> Payload {
        let next = timeout(Duration::from_secs(60), self.answers.recv()).await;
        next.expect("no answer").unwrap().unwrap().payload.unwrap()
    }

    async fn dial(&mut self, address: &str, random: i64) -> Result<i64, String> {
        self.send(Packet::dial_request(address.to_owned(), random)).await;
        match self.next().await {
            Payload::DialResponse(answer) if answer.random == random => {
                if answer.error.is_empty() {
                    Ok(answer.connect_id)
                } else {
                    Err(answer.error)
                }
            }
            other => panic!("{other:?}"),
        }
    }

    async fn echo(&mut self, connect_id: i64) {
        self.send(Packet::data(connect_id, Bytes::from_static(b"hello"))).await;
        match self.next().await {
            Payload::Data(data) => {
                assert_eq!((data.connect_id, &data.data[..]), (connect_id, &b"hello"[..]));
            }
            other => panic!("{other:?}"),
        }
    }

    async fn closed(&mut self) -> (i64, String) {
        match self.next().await {
            Payload::CloseResponse(close) => (close.connect_id, close.error),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn packets_are_answered() {
    let mut caller = Caller::new();
    caller.send(Packet::data(5, Bytes::from_static(b"early"))).await;
    assert_eq!(caller.closed().await, (5, "too early".to_owned()));
    assert_eq!(caller.dial("nobody:1", 7).await, Err("connection refused".to_owned()));
    let connect_id = caller.dial("echo:1", 8).await.unwrap();
    assert_eq!(connect_id, 102);
    caller.echo(connect_id).await;
    caller.send(Packet::data(99, Bytes::from_static(b"unknown"))).await;
    assert_eq!(caller.closed().await, (99, "unrecognized connectID".to_owned()));
    caller.send(Packet::close_request(connect_id)).await;
    assert_eq!(caller.closed().await, (connect_id, String::new()));
    caller.send(Packet::close_request(connect_id)).await;
    assert_eq!(caller.closed().await, (connect_id, "Unknown connectID".to_owned()));
    // A closed dial gets no answer, and its number can be used again.
    caller.send(Packet::dial_request("waits:1".to_owned(), 9)).await;
    caller.send(Packet::close_dial(9)).await;
    caller.send(Packet::drain()).await;
    let connect_id = caller.dial("echo:1", 10).await.unwrap();
    caller.echo(connect_id).await;
}

#[tokio::test(start_paused = true)]
async fn a_target_that_takes_nothing_is_cut_off_for_the_sake_of_others() {
    let mut caller = Caller::new();
    let stalled = caller.dial("stalls:1", 1).await.unwrap();
    // If it is alone, its sender waits.
    caller.send_pieces(stalled, 2).await;
    caller.send(Packet::dial_request("echo:1".to_owned(), 2)).await;
    assert!(timeout(BOUNDS.patience * 10, caller.answers.recv()).await.is_err());

    let mut caller = Caller::new();
    let stalled = caller.dial("stalls:1", 1).await.unwrap();
    let echo = caller.dial("echo:1", 2).await.unwrap();
    let started = Instant::now();
    caller.send_pieces(stalled, 1).await;
    caller.echo(echo).await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    caller.send_pieces(stalled, 1).await;
    assert_eq!(caller.closed().await, (stalled, "stalled".to_owned()));
    let waited = started.elapsed();
    assert!(waited >= BOUNDS.patience && waited < BOUNDS.patience * 2, "{waited:?}");
    caller.echo(echo).await;
}

#[tokio::test(start_paused = true)]
async fn dials_of_other_callers_do_not_wait_for_the_only_connections_target() {
    let mut caller = Caller::beside_others();
    let stalled = caller.dial("stalls:1", 1).await.unwrap();
    let started = Instant::now();
    caller.send_pieces(stalled, 2).await;
    caller.send(Packet::dial_request("echo:1".to_owned(), 2)).await;
    // Each is answered by its own task.
    let (mut closed, mut connected) = (None, None);
    for _ in 0..2 {
        match caller.next().await {
            Payload::CloseResponse(close) => closed = Some((close.connect_id, close.error)),
            Payload::DialResponse(answer) => connected = Some(answer.connect_id),
            other => panic!("{other:?}"),
        }
    }
    let waited = started.elapsed();
    assert!(waited >= BOUNDS.patience && waited < BOUNDS.patience * 2, "{waited:?}");
    assert_eq!(closed, Some((stalled, "stalled".to_owned())));
    caller.echo(connected.unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_only_slow_goes_on() {
    let mut caller = Caller::beside_others();
    let slow = caller.dial("slow:1", 1).await.unwrap();
    let started = Instant::now();
    caller.send_pieces(slow, 10).await;
    let echo = caller.dial("echo:1", 2).await.unwrap();
    caller.send_pieces(slow, 10).await;
    caller.echo(echo).await;
    let waited = started.elapsed();
    assert!(waited > BOUNDS.patience * 10, "{waited:?}");
    caller.send(Packet::close_request(slow)).await;
    assert_eq!(caller.closed().await, (slow, String::new()));
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_all_is_bounded_too() {
    let mut caller = Caller::new();
    let mut stalled = Vec::new();
    for random in 1..=6 {
        stalled.push(caller.dial("stalls:1", random).await.unwrap());
    }
    assert!(caller.dial("echo:1", 7).await.unwrap_err().contains("too many open files"));
    // 900 for the last one, 500 for each of the others: 3,400 of 3,000.
    caller.send(Packet::data(stalled[5], Bytes::from_static(&[0; 900]))).await;
    for connect_id in &stalled[..5] {
        caller.send(Packet::data(*connect_id, Bytes::from_static(&[0; 500]))).await;
    }
    assert_eq!(caller.closed().await, (stalled[5], "stalled".to_owned()));
    assert!(timeout(BOUNDS.patience * 10, caller.answers.recv()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn connections_that_end_while_the_caller_does_not_read_leave_room_to_say_so() {
    // More than packets that wait.
    const COUNT: i64 = 5;
    let mut caller = Caller::new();
    for random in 1..=COUNT {
        caller.send(Packet::dial_request("sends:1".to_owned(), random)).await;
    }
    let mut connected = 0;
    while connected < COUNT {
        connected += i64::from(matches!(caller.next().await, Payload::DialResponse(_)));
    }
    // All of them wait for the caller, and are then cut.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for random in 1..=COUNT {
        caller.send(Packet::close_dial(random)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut ended = 0;
    while ended < COUNT {
        ended += i64::from(matches!(caller.next().await, Payload::CloseResponse(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn closed_connections_count_until_they_have_ended() {
    let mut caller = Caller::new();
    let piece = Bytes::from_static(&[0; 900]);
    // Their targets take nothing, and they may continue.
    for random in 1..=3 {
        let connect_id = caller.dial("stalls:1", random).await.unwrap();
        caller.send(Packet::data(connect_id, piece.clone())).await;
        caller.send(Packet::close_request(connect_id)).await;
        assert_eq!(caller.closed().await, (connect_id, String::new()));
    }
    // One of them must make room for an open connection.
    let open = caller.dial("stalls:1", 4).await.unwrap();
    caller.send(Packet::data(open, piece.slice(..800))).await;
    for random in 5..=7 {
        caller.dial("echo:1", random).await.unwrap();
    }
    assert!(caller.dial("echo:1", 8).await.unwrap_err().contains("too many open files"));
    assert!(timeout(BOUNDS.linger - Duration::from_secs(1), caller.answers.recv()).await.is_err());
    // The others have ended after a while.
    tokio::time::sleep(Duration::from_secs(2)).await;
    caller.dial("echo:1", 9).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn streams_have_equal_parts_of_what_they_share() {
    let room = Arc::new(Room::new(ALL));
    let (mut greedy, mut other) = (Caller::sharing(&room), Caller::sharing(&room));
    let (first, second) =
        (greedy.dial("stalls:1", 1).await.unwrap(), greedy.dial("stalls:1", 2).await.unwrap());
    greedy.send(Packet::data(first, Bytes::from_static(&[0; 900]))).await;
    greedy.send(Packet::data(second, Bytes::from_static(&[0; 700]))).await;
    assert_eq!(greedy.closed().await, (first, "stalled".to_owned()), "1,600 of 1,500");
    let (waits, echo) = (other.dial("stalls:1", 1).await.unwrap(), other.dial("echo:1", 2).await.unwrap());
    other.send(Packet::data(waits, Bytes::from_static(&[0; 900]))).await;
    other.echo(echo).await;
    // Alone, it has all of the room.
    drop(other);
    let third = greedy.dial("stalls:1", 3).await.unwrap();
    greedy.send(Packet::data(third, Bytes::from_static(&[0; 900]))).await;
    assert!(timeout(BOUNDS.patience * 10, greedy.answers.recv()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn closed_connections_outlive_their_stream_where_there_is_room() {
    let room = Arc::new(Room::new(ALL));
    let left = async |connections: i64| {
        let mut caller = Caller::sharing(&room);
        for random in 1..=connections {
            let connect_id = caller.dial("stalls:1", random).await.unwrap();
            caller.send(Packet::data(connect_id, Bytes::from_static(&[0; 900]))).await;
            caller.send(Packet::close_request(connect_id)).await;
            assert_eq!(caller.closed().await, (connect_id, String::new()));
        }
        drop(caller);
        tokio::time::sleep(Duration::from_secs(1)).await;
        room.waiting()
    };
    assert_eq!(left(1).await, 900);
    // Together with these it would exceed half.
    assert_eq!(left(1).await, 900);
    tokio::time::sleep(BOUNDS.linger).await;
    assert_eq!(room.waiting(), 0);
    assert_eq!(left(2).await, 0);
}

#[tokio::test(start_paused = true)]
async fn short_pieces_count_as_the_memory_that_they_take() {
    let mut caller = Caller::new();
    let stalled = caller.dial("stalls:1", 1).await.unwrap();
    let echo = caller.dial("echo:1", 2).await.unwrap();
    // 15 pieces of at least 64 bytes fit into 1,000, and empty ones are not kept.
    for _ in 0..15 {
        caller.send(Packet::data(stalled, Bytes::new())).await;
        caller.send(Packet::data(stalled, Bytes::from_static(b"x"))).await;
    }
    let started = Instant::now();
    caller.echo(echo).await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    caller.send(Packet::data(stalled, Bytes::from_static(b"x"))).await;
    assert_eq!(caller.closed().await, (stalled, "stalled".to_owned()));
    // Data that was read no longer counts.
    for _ in 0..100 {
        caller.echo(echo).await;
    }
}
