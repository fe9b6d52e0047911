//! Measurement of a link by its server: a stream like that of a tunnelled connection, whose target is the agent
//! itself.
//!
//! The server opens a stream with [`BENCH_PATH`] and [`MODE_HEADER`]; the rest is as with Relay. The sending end
//! limits its time and bytes, and the agent serves one at a time.

use std::io;
use std::str::FromStr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Path of a measurement stream.
pub const BENCH_PATH: &str = "/postern.tunnel.v1.Agent/Bench";
/// Request metadata: a [`Mode`].
pub const MODE_HEADER: &str = "postern-bench";
/// Maximum time for which an end sends.
pub const SEND_FOR: Duration = Duration::from_secs(2);
/// Maximum number of bytes that an end sends.
pub const SEND_AT_MOST: u64 = 512 << 20;
/// Time after which a stream that has not ended is reset. It is long because a slow line may still hold much of the
/// data.
pub const LONGEST: Duration = Duration::from_secs(20);

const PIECE: usize = 64 << 10;

/// Role of the agent in a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sends back what it receives.
    Echo,
    /// Sends for [`SEND_FOR`], then ends.
    Source,
    /// Reads to the end, then answers with the number of bytes (8 bytes, big-endian).
    Sink,
}

impl Mode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Source => "source",
            Self::Sink => "sink",
        }
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Echo, Self::Source, Self::Sink];
        all.into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| format!("{MODE_HEADER}: not echo, source or sink"))
    }
}

/// Plays the agent's part, as the target of the stream.
///
/// # Errors
/// Fails if the stream was reset.
pub async fn serve(mode: Mode, stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
    let (mut read, mut write) = tokio::io::split(stream);
    match mode {
        Mode::Echo => {
            tokio::io::copy(&mut read, &mut write).await?;
        }
        Mode::Source => {
            send(&mut write).await?;
        }
        Mode::Sink => {
            let count = swallow(&mut read).await?;
            write.write_u64(count).await?;
        }
    }
    write.shutdown().await
}

/// Sends until the time or the bytes are used up. Returns the number of bytes.
///
/// # Errors
/// Fails if the stream was reset.
pub async fn send(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<u64> {
    // Not zeros: nothing on the path should be able to compress it.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let piece: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    })
    .take(PIECE)
    .collect();
    let (started, mut sent) = (Instant::now(), 0);
    while started.elapsed() < SEND_FOR && sent < SEND_AT_MOST {
        stream.write_all(&piece).await?;
        sent += piece.len() as u64;
    }
    Ok(sent)
}

/// Reads to the end. Returns the number of bytes.
///
/// # Errors
/// Fails if the stream was reset.
pub async fn swallow(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<u64> {
    let (mut buffer, mut count) = (vec![0; PIECE], 0);
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(count),
            read => count += read as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_mode_does_what_it_says() {
        let begin = async |mode: Mode| {
            let (measured, served) = tokio::io::duplex(PIECE);
            (measured, tokio::spawn(serve(mode, served)))
        };
        let (mut stream, task) = begin(Mode::Echo).await;
        stream.write_all(b"sixty-four").await.unwrap();
        let mut back = [0; 10];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"sixty-four");
        stream.shutdown().await.unwrap();
        task.await.unwrap().unwrap();

        let (mut stream, task) = begin(Mode::Sink).await;
        stream.write_all(&[7; 300_000]).await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(stream.read_u64().await.unwrap(), 300_000);
        task.await.unwrap().unwrap();

        let (mut stream, task) = begin(Mode::Source).await;
        let started = Instant::now();
        let count = swallow(&mut stream).await.unwrap();
        assert!(count > 0 && count <= SEND_AT_MOST + PIECE as u64 && started.elapsed() < LONGEST);
        task.await.unwrap().unwrap();
    }

    #[test]
    fn modes_are_read_as_they_are_written() {
        for mode in [Mode::Echo, Mode::Source, Mode::Sink] {
            assert_eq!(mode.as_str().parse(), Ok(mode));
        }
        assert!("flood".parse::<Mode>().is_err());
    }
}
