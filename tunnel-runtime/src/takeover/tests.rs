use super::*;

fn copy(listener: &TcpListener) -> (String, SocketAddr, OwnedFd) {
    ("listener".to_owned(), listener.local_addr().unwrap(), listener.try_clone().unwrap().into())
}

#[tokio::test]
async fn a_successor_gets_sockets_and_answers() {
    let state = tempfile::tempdir().unwrap();
    assert!(Predecessor::<Vec<u8>>::find(state.path()).await.is_none());
    let path = socket_path(state.path());
    // State left by a killed program.
    drop(Listener::bind(&path).unwrap());
    assert!(Predecessor::<Vec<u8>>::find(state.path()).await.is_none());
    let replaced = Listener::bind(&path).unwrap();
    assert!(replaced.is_found());
    let waiting = Listener::bind(&path).unwrap();
    assert!(waiting.is_found() && !replaced.is_found());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    let listeners = ["127.0.0.1:0", "[::1]:0"].map(|at| TcpListener::bind(at).unwrap());
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let copies = Copies::new(listeners.iter().map(copy).collect());
    let first = tokio::spawn(async move {
        let mut stream = waiting.accept().await.unwrap();
        assert!(successor(&*stream).unwrap().is_some());
        copies.greet(&mut *stream, "1.2.3", vec![7u8]).await.unwrap();
        let asked: Option<String> = receive(&mut *stream).await.unwrap();
        send(&mut *stream, &asked.map(|asked| asked.len())).await.unwrap();
        // The successor's end closes the connection.
        assert_eq!(receive::<String>(&mut *stream).await.unwrap(), None);
    });
    let mut second = Predecessor::<Vec<u8>>::find(state.path()).await.unwrap();
    assert_eq!((second.own(), second.pid()), (&vec![7], std::process::id()));
    assert!(second.listener("other", |_| true).is_none());
    for at in addresses.iter().rev() {
        let taken = second.listener("listener", |other| other == *at).unwrap();
        assert_eq!(taken.local_addr().unwrap(), *at);
    }
    assert!(second.listener("listener", |_| true).is_none(), "each is given once");
    assert_eq!(second.ask::<_, Option<usize>>(&"question").await.unwrap(), Some(8));
    drop(second);
    first.await.unwrap();
}

#[tokio::test]
async fn nobody_waits_in_a_listener_that_was_not_taken() {
    let listeners = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let [taken, left] = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let (mut first, second) = UnixStream::pair().unwrap();
    Copies::new(listeners.iter().map(copy).collect()).greet(&mut first, "1.2.3", ()).await.unwrap();
    let mut second = Predecessor::<()>::at(Path::new("takeover"), Box::new(second)).await.unwrap();
    let _taken = second.listener("listener", |at| at == taken).unwrap();
    let connect = async |at: SocketAddr| tokio::net::TcpStream::connect(at).await.unwrap();
    let (mut early, mut served) = (connect(left).await, connect(taken).await);
    second.refuse_rest();
    assert_eq!(early.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    let waits = timeout(Duration::from_millis(50), served.read_u8()).await;
    assert!(waits.is_err(), "the listener that was taken is refused");

    second.refuse_nothing().await;
    let mut back = connect(left).await;
    let waits = timeout(Duration::from_millis(50), back.read_u8()).await;
    assert!(waits.is_err(), "the predecessor does not get it");
    listeners[1].accept().unwrap();
    drop(listeners);
    let error = tokio::net::TcpStream::connect(left).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test(start_paused = true)]
async fn one_that_answers_too_late_has_not_ended() {
    let (mut first, stream) = UnixStream::pair().unwrap();
    let greeting = Greeting { version: "1.2.3".to_owned(), pid: 1, listeners: Vec::new(), own: () };
    let (stream, sockets, refusing) = (Box::new(stream), Vec::new(), JoinSet::new());
    let mut second = Predecessor { stream, greeting, sockets, refusing };
    let error = second.ask::<_, String>(&"question").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert_eq!(receive::<String>(&mut first).await.unwrap().as_deref(), Some("question"));
    send(&mut first, &"answer").await.unwrap();
    assert!(timeout(ANSWER, second.ended()).await.is_err(), "it still runs");
    drop(first);
    second.ended().await;
}

#[tokio::test]
async fn as_many_sockets_as_there_may_be_are_passed_on() {
    let (first, second) = UnixStream::pair().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sockets = vec![listener.as_fd(); MOST_SOCKETS + 1];
    let refused = send_sockets(&first, &sockets).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    send_sockets(&first, &sockets[1..]).await.unwrap();
    assert_eq!(receive_sockets(&second).await.unwrap().len(), MOST_SOCKETS);
}

#[tokio::test]
async fn what_is_not_ours_is_refused() {
    let (mut first, mut second) = UnixStream::pair().unwrap();
    first.write_all(b"GET / HTTP/1.1").await.unwrap();
    assert!(receive_sockets(&second).await.is_err());
    first.write_all(&[0xff; 8]).await.unwrap();
    assert!(receive::<String>(&mut second).await.is_err());
}
