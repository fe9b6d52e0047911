//! Properties of every listener that speaks HTTP, with and without TLS: the scenario says how to connect to it.
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::client::{self, PATIENCE, Pattern};
use postern_testbed::server::Server;
use postern_testbed::wait::wait_until;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::web::Web;

/// Size of an upload in bytes.
pub(crate) const UPLOAD: u64 = 8 << 20;
/// Duration of a slow upload, and its number of pieces.
const SLOW: (Duration, u32) = (Duration::from_secs(12), 64);

/// Sends bytes to the listener, and reads to the end.
pub(crate) async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &[u8]) -> Result<String> {
    send(&mut stream, request).await?;
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    read.context("the listener neither answered nor closed")?.context("reading the answer to its end")?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// The TLS stream buffers bytes that the socket does not accept at once, until it is flushed.
async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await?;
    Ok(())
}

async fn read_until(stream: &mut (impl AsyncRead + Unpin), end: &[u8]) -> Result<String> {
    let mut read = Vec::new();
    let reading = async {
        while !read.ends_with(end) {
            ensure!(stream.read_buf(&mut read).await? > 0, "closed after {}", String::from_utf8_lossy(&read));
        }
        Ok(())
    };
    let what = String::from_utf8_lossy(end);
    timeout(PATIENCE, reading).await.with_context(|| format!("{what:?} did not come"))??;
    Ok(String::from_utf8_lossy(&read).into_owned())
}

/// Returns a request for another protocol, as its clients send it.
fn upgrade(path: &str, host: &str, (method, protocol): (&str, &str)) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n")
}

/// Checks an upgrade. `asked`: the request's method, and the protocol.
pub(crate) async fn an_upgrade_is_relayed<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
    asked: (&str, &str),
) -> Result<()> {
    let mut stream = connect().await?;
    // Together with the client's first bytes in the other protocol, and more of them before there is an answer.
    send(&mut stream, format!("{}early ", upgrade("/echo-upgraded", host, asked)).as_bytes()).await?;
    send(&mut stream, b"and more").await?;
    let answer = read_until(&mut stream, b"\r\n\r\nearly and more").await?;
    let (head, protocol) = (answer.to_lowercase(), format!("\r\nupgrade: {}\r\n", asked.1.to_lowercase()));
    ensure!(head.starts_with("http/1.1 101 ") && head.contains(&protocol), "{head}");
    client::echo(&mut stream, b"and later ones").await?;
    stream.shutdown().await?;
    let rest = client::text(&mut stream, "no end came back").await?;
    ensure!(rest.is_empty(), "{rest:?} came back before the end");
    Ok(())
}

/// A refused upgrade is answered in full, and bytes sent ahead are not taken for a request.
pub(crate) async fn a_refused_upgrade_is_answered<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
    asked: (&str, &str),
) -> Result<()> {
    let answer = only_answer(connect().await?, "/refuse", host, asked).await?;
    ensure!(answer.starts_with("HTTP/1.1 403 ") && answer.ends_with("not for you\n"), "{answer:?}");
    Ok(())
}

/// The same for an upgrade that the server refuses because nothing listens on the target's port.
pub(crate) async fn an_upgrade_without_a_target_is_answered<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
    asked: (&str, &str),
) -> Result<()> {
    let answer = only_answer(connect().await?, "/", host, asked).await?;
    ensure!(answer.starts_with("HTTP/1.1 502 "), "{answer:?}");
    Ok(())
}

/// Asks for an upgrade, sends another request ahead, and returns the only answer.
async fn only_answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    path: &str,
    host: &str,
    asked: (&str, &str),
) -> Result<String> {
    let ahead = format!("{}GET / HTTP/1.1\r\nHost: {host}\r\n\r\n", upgrade(path, host, asked));
    let answer = ask(stream, ahead.as_bytes()).await?;
    ensure!(answer.matches("HTTP/1.1").count() == 1, "a second request was answered: {answer:?}");
    Ok(answer)
}

/// Expects the answer of `/digest` to an upload that has been sent.
async fn arrives_whole(stream: impl AsyncRead + AsyncWrite + Unpin, body: &Pattern) -> Result<()> {
    let answer = ask(stream, b"").await?;
    let arrived = format!("\r\n\r\n{UPLOAD} {}\n", body.digest());
    ensure!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(&arrived), "{answer:?}, not {arrived:?}");
    Ok(())
}

/// A client that waits for the 100 gets it and its upload arrives complete, unless the target refuses: then it gets
/// only the refusal.
pub(crate) async fn an_expectation_is_answered<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
) -> Result<()> {
    let head = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nExpect: 100-continue\r\nContent-Length: {UPLOAD}\r\nConnection: close\r\n\r\n"
        )
    };
    let mut stream = connect().await?;
    send(&mut stream, head("/digest").as_bytes()).await?;
    let interim = read_until(&mut stream, b"\r\n\r\n").await?;
    ensure!(interim.starts_with("HTTP/1.1 100 "), "{interim:?}");
    let mut body = Pattern::new(5, UPLOAD);
    body.write_to(&mut stream).await?;
    arrives_whole(stream, &body).await?;
    let answer = ask(connect().await?, head("/unwanted").as_bytes()).await?;
    ensure!(answer.starts_with("HTTP/1.1 417 ") && answer.ends_with("keep it\n"), "{answer:?}");
    Ok(())
}

/// A client that sends all of a body that nobody wants is not reset, and gets the answer.
pub(crate) async fn an_unwanted_upload_is_answered<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
) -> Result<()> {
    let mut stream = connect().await?;
    let head = format!("POST / HTTP/1.1\r\nHost: edge-9:9100\r\nContent-Length: {UPLOAD}\r\n\r\n");
    send(&mut stream, head.as_bytes()).await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut body = Pattern::new(5, UPLOAD);
    let sent = async { body.write_to(&mut writer).await.context("sending a body after the answer") };
    let (answer, ()) = tokio::try_join!(client::text(&mut reader, "the listener did not close"), sent)?;
    ensure!(answer.starts_with("HTTP/1.1 4"), "{answer:?}");
    Ok(())
}

/// A slow upload is not cut, unlike by YurtTunnel, which cuts it after 10 s.
pub(crate) async fn a_slow_upload_arrives<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
) -> Result<()> {
    let (span, pieces) = SLOW;
    let mut stream = connect().await?;
    let head = format!(
        "POST /digest HTTP/1.1\r\nHost: {host}\r\nContent-Length: {UPLOAD}\r\nConnection: close\r\n\r\n"
    );
    let begin = Instant::now();
    send(&mut stream, head.as_bytes()).await?;
    let (mut body, mut buffer) = (Pattern::new(6, UPLOAD), vec![0; (UPLOAD / u64::from(pieces)) as usize]);
    let mut clock = tokio::time::interval(span / pieces);
    while let Some(piece) = body.chunk(&mut buffer) {
        clock.tick().await;
        let sent = timeout(PATIENCE, send(&mut stream, piece)).await.context("the upload is stuck")?;
        sent.with_context(|| format!("cut after {:.1?}", begin.elapsed()))?;
    }
    arrives_whole(stream, &body).await?;
    ensure!(begin.elapsed() > Duration::from_secs(10), "it took only {:.1?}", begin.elapsed());
    Ok(())
}

/// A client that half-closes after its request, like `nc -N`, gets the whole answer and a clean end, however late they
/// come.
pub(crate) async fn an_ended_half_is_answered<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    host: &str,
    (path, part): (&str, &str),
) -> Result<()> {
    for version in ["1.1", "1.0"] {
        let mut stream = connect().await?;
        send(&mut stream, format!("GET {path} HTTP/{version}\r\nHost: {host}\r\n\r\n").as_bytes()).await?;
        stream.shutdown().await?;
        let answer = client::text(&mut stream, "no answer came").await;
        let answer = answer.with_context(|| format!("HTTP/{version}"))?;
        ensure!(answer.starts_with("HTTP/1.") && answer.contains(" 200 "), "HTTP/{version}: {answer:?}");
        ensure!(answer.contains(part), "HTTP/{version}: no {part:?} in {answer:?}");
    }
    Ok(())
}

/// The target's connection ends when a caller resets its own, before the answer and in the middle of it. `web` must be
/// new.
pub(crate) async fn a_reset_reaches_the_target<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    socket: impl Fn(&S) -> &TcpStream,
    host: &str,
    web: &Web,
) -> Result<()> {
    let reset = |stream: S| socket2::SockRef::from(socket(&stream)).set_linger(Some(Duration::ZERO));
    let mut stream = connect().await?;
    send(&mut stream, format!("GET /wait HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await?;
    wait_until("the request to arrive", PATIENCE, async || Ok(web.waiting()), |count| *count == 1).await?;
    reset(stream)?;
    wait_until("the target to be told", PATIENCE, async || Ok(web.abandoned()), |count| *count == 1).await?;
    let mut stream = connect().await?;
    send(&mut stream, format!("GET /half HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).await?;
    read_until(&mut stream, b"half\r\n").await?;
    ensure!(web.abandoned() == 1, "the target's connection ended before the caller's");
    reset(stream)?;
    wait_until(
        "the target to be told while it answers",
        PATIENCE,
        async || Ok(web.abandoned()),
        |count| *count == 2,
    )
    .await?;
    Ok(())
}

/// An upgraded connection to a target that says nothing ends when the caller, which has ended its half, resets the rest.
pub(crate) async fn a_reset_ends_an_upgrade<S: AsyncRead + AsyncWrite + Unpin>(
    connect: impl AsyncFn() -> Result<S>,
    socket: impl Fn(&S) -> &TcpStream,
    host: &str,
) -> Result<()> {
    let mut stream = connect().await?;
    send(&mut stream, upgrade("/silent-upgraded", host, ("GET", "websocket")).as_bytes()).await?;
    let answer = read_until(&mut stream, b"\r\n\r\n").await?;
    ensure!(answer.starts_with("HTTP/1.1 101 "), "{answer}");
    stream.shutdown().await?;
    socket2::SockRef::from(socket(&stream)).set_linger(Some(Duration::ZERO))?;
    Ok(())
}

/// Waits until `count` access lines of the listener say that the caller left.
pub(crate) async fn departures_are_logged(server: &Server<'_>, listener: &str, count: usize) -> Result<()> {
    let left = async || {
        let lines = server.access_log()?.into_iter().filter(|line| line.text("listener") == listener);
        Ok(lines.map(|line| line.text("outcome")).collect::<Vec<_>>())
    };
    let all = |outcomes: &Vec<String>| {
        outcomes.len() == count && outcomes.iter().all(|outcome| outcome == "client_reset")
    };
    wait_until("the callers that left to be logged", PATIENCE, left, all).await.map(drop)
}
