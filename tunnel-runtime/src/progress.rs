//! Says on a terminal what a command waits for, once it has taken two seconds.

use std::env;
use std::io::{self, IsTerminal as _, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time without a word.
const PATIENCE: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_secs(1);
/// Characters; a longer line would wrap, and could not be erased.
const WIDTH: usize = 70;
/// Returns to the start of the line and erases it.
const ERASE: &str = "\r\x1b[K";

/// A line on standard error, if that is a terminal. Dropping this erases it. What is written to this goes to standard output,
/// once the line is erased.
#[derive(Debug)]
pub struct Progress(Option<(Sender<String>, JoinHandle<()>)>);

impl Progress {
    /// Begins to count the time of a `command`, which is `doing` something.
    pub fn start(command: &'static str, doing: impl Into<String>) -> Self {
        let terminal = io::stderr().is_terminal() && env::var_os("TERM").is_none_or(|kind| kind != "dumb");
        if !terminal {
            return Self(None);
        }
        let (says, said) = mpsc::channel();
        let writer = thread::Builder::new().spawn(move || follow(command, &said, io::stderr()));
        let progress = Self(writer.ok().map(|writer| (says, writer)));
        progress.set(doing);
        progress
    }

    /// Says nothing.
    pub fn none() -> Self {
        Self(None)
    }

    /// Says what the command does from now on.
    pub fn set(&self, doing: impl Into<String>) {
        if let Some((says, _)) = &self.0 {
            // The writer ends early only if it panics.
            says.send(doing.into()).ok();
        }
    }

    fn end(&mut self) {
        if let Some((says, writer)) = self.0.take() {
            drop(says);
            writer.join().ok();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}

impl Write for Progress {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end();
        io::stdout().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

fn follow(command: &str, said: &Receiver<String>, mut out: impl Write) {
    let started = Instant::now();
    let mut doing = String::new();
    let mut is_shown = false;
    loop {
        match said.recv_timeout(TICK) {
            Ok(next) => doing = next,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if started.elapsed() >= PATIENCE {
            let line: String = format!("{command}: {doing}").chars().take(WIDTH).collect();
            is_shown = true;
            // There is no place to report a failure.
            write!(out, "{ERASE}{line} … ({} s)", started.elapsed().as_secs()).ok();
            out.flush().ok();
        }
    }
    if is_shown {
        write!(out, "{ERASE}").ok();
        out.flush().ok();
    }
}
