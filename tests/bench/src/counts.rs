//! System calls and wake-ups of both ends for one connection, one message, one MB: values that do not depend on the
//! machine's speed. Measured in a separate pass, because counting costs time.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use postern_testbed::Testbed;
use postern_testbed::load_target::ECHO;
use postern_testbed::process::Process;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::{OpenOptions, Receiver, Sender};
use tokio::time::timeout;

use crate::catalogue::COUNTED;
use crate::line::{Group, Peer};
use crate::load::{self, Effort, Way, as_f64};
use crate::peers::Running;
use crate::record::Record;
use crate::usage::{self, Part};

/// Maximum time for perf in one step.
const PERF: Duration = Duration::from_secs(10);
/// Maximum number of Postern's system calls for one unit, somewhat above the present one. It does not depend on the machine's
/// speed, so a higher one fails the run.
const MOST: [(&str, f64); 2] = [("visit", 75.0), ("trip", 14.0)];
/// Minimum number of visits and trips, also where they are slow: each step has calls of its own.
const JUDGED: f64 = 100.0;
/// Minimum time of a step.
const SPAN: Duration = Duration::from_millis(300);
/// The tracepoint at the start of every system call.
const EVENT: &str = "raw_syscalls:sys_enter";

pub(crate) async fn measure(
    testbed: &Testbed,
    peer: Peer,
    on: &Running<'_>,
    effort: &Effort,
    record: &mut Record,
) -> Result<()> {
    if on.parts.is_empty() {
        record.group_missing(Group::Counts, peer, "it has no programs");
        return Ok(());
    }
    for (what, _) in COUNTED {
        let perf = Perf::start(testbed, &on.parts).await;
        let before = usage::voluntary_switches(&on.parts)?;
        let units = work(what, on, effort).await?;
        let wakes = usage::voluntary_switches(&on.parts)?.saturating_sub(before);
        record.value(&format!("counts-wakes-{what}"), peer, as_f64(wakes) / units);
        let calls = match perf {
            Ok(perf) => perf.stop().await,
            Err(error) => Err(error),
        };
        let line = format!("counts-calls-{what}");
        match calls {
            Ok(calls) => {
                let calls = as_f64(calls) / units;
                let judged = peer == Peer::Postern;
                match MOST.iter().find(|(of, most)| *of == what && judged && calls > *most) {
                    Some((_, most)) => {
                        record.failed(&line, peer, &format!("{calls:.1} system calls, {most} at most"));
                    }
                    None => record.value(&line, peer, calls),
                }
            }
            // Not every machine has perf, or permits it to count.
            Err(error) => record.missing(&line, peer, &format!("{error:#}")),
        }
    }
    Ok(())
}

/// Does the counted work; returns its units.
async fn work(what: &str, on: &Running<'_>, effort: &Effort) -> Result<f64> {
    let end = Instant::now() + SPAN.max(effort.span / 3);
    let mut done = 0;
    match what {
        "visit" => {
            while Instant::now() < end || as_f64(done) < JUDGED {
                load::visit(&on.dialer).await?;
                done += 1;
            }
        }
        "trip" => {
            let mut stream = on.dialer.dial(ECHO).await?;
            while Instant::now() < end || as_f64(done) < JUDGED {
                load::trip(&mut stream, &mut [1; 64]).await?;
                done += 1;
            }
            stream.close().await?;
        }
        _ => {
            let moved = load::bulk(&on.dialer, Way::Down, 1, effort.first_bytes).await?;
            return Ok(as_f64(moved.bytes) / 1e6);
        }
    }
    Ok(as_f64(done))
}

/// `perf stat` on the programs of a peer.
struct Perf {
    process: Process,
    commands: Sender,
    answers: Receiver,
    output: PathBuf,
}

impl Perf {
    /// Starts perf, which counts once this returns.
    async fn start(testbed: &Testbed, parts: &[Part]) -> Result<Self> {
        let installed =
            Command::new("perf").arg("--version").output().is_ok_and(|output| output.status.success());
        ensure!(installed, "perf is not installed");
        let (output, commands) = (testbed.dir().join("perf.csv"), testbed.dir().join("perf.commands"));
        let answers = testbed.dir().join("perf.answers");
        for fifo in [&commands, &answers] {
            if !fifo.exists() {
                nix::unistd::mkfifo(fifo, Mode::S_IRUSR | Mode::S_IWUSR).context("a named pipe")?;
            }
        }
        let pids: Vec<String> = parts.iter().map(|part| part.pid.to_string()).collect();
        // perf mounts tracefs where it is missing: in a mount namespace of its own that goes with it.
        let mut command = Command::new("unshare");
        command.args(["--mount", "perf", "stat", "--field-separator=,", "--delay=-1", "--event", EVENT]);
        command.arg(format!("--control=fifo:{},{}", commands.display(), answers.display()));
        command.arg("--output").arg(&output).arg("--pid").arg(pids.join(","));
        let process = Process::spawn(testbed.dir(), "perf", command)?;
        // Opened for reading and writing, a pipe does not wait for its other end.
        let (mut sender, mut receiver) = (OpenOptions::new(), OpenOptions::new());
        let commands = sender.read_write(true).open_sender(commands).context("perf's commands")?;
        let answers = receiver.read_write(true).open_receiver(answers).context("perf's answers")?;
        let mut perf = Self { process, commands, answers, output };
        match perf.command("enable\n").await {
            Ok(()) => Ok(perf),
            Err(error) => Err(error.context(perf.last_line())),
        }
    }

    async fn command(&mut self, command: &str) -> Result<()> {
        self.commands.write_all(command.as_bytes()).await.context("writing perf's command")?;
        // "ack", a line's end, and with some versions the C string's end behind it.
        let answer = async {
            while self.answers.read_u8().await? != b'\n' {}
            std::io::Result::Ok(())
        };
        tokio::select! {
            answered = timeout(PERF, answer) => Ok(answered.context("perf did not answer")??),
            ended = self.process.wait_exit(PERF) => bail!("perf ended with {}", ended?),
        }
    }

    /// The last line of perf's output, which is long.
    fn last_line(&self) -> String {
        let output = self.process.output().unwrap_or_default();
        let line = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output");
        format!("perf cannot count: {}", line.trim())
    }

    /// System calls since the start.
    async fn stop(mut self) -> Result<u64> {
        self.command("disable\n").await?;
        self.process.signal(Signal::SIGINT)?;
        self.process.wait_exit(PERF).await?;
        count(&self.output)
    }
}

fn count(file: &Path) -> Result<u64> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    count_in(&text).with_context(|| format!("no count in perf's output {text:?}"))
}

/// Parses `COUNT,UNIT,EVENT,…`, below comments.
fn count_in(text: &str) -> Option<u64> {
    text.lines().find(|line| line.contains(EVENT))?.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_output_is_parsed() {
        let text = "# started on Sat Nov 21 10:00:00 2026\n\n1234,,raw_syscalls:sys_enter,998877,100.00,,\n";
        assert_eq!(count_in(text), Some(1234));
        assert_eq!(count_in("<not counted>,,raw_syscalls:sys_enter,0,0.00,,\n"), None);
        assert_eq!(count_in(""), None);
    }
}
