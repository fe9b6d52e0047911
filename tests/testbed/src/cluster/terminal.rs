//! A terminal for `kubectl exec -it`: its output and its size.
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::process::{Child, Command};

use crate::wait::wait_for;

/// A terminal with a program attached.
pub struct Terminal {
    controller: OwnedFd,
    shown: Receiver<Vec<u8>>,
    text: String,
    pub child: Child,
}

impl Terminal {
    /// Starts a command at a terminal of this size.
    pub fn start(mut command: Command, rows: u16, columns: u16) -> Result<Self> {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .context("opening a terminal")?;
        grantpt(&controller).context("grantpt")?;
        unlockpt(&controller).context("unlockpt")?;
        let path = ptsname(&controller, Vec::new()).context("ptsname")?;
        let path = path.to_str().context("the terminal's name")?.to_owned();
        resize(&controller, rows, columns)?;
        let end =
            || File::options().read(true).write(true).open(&path).context("opening the terminal's other end");
        command.stdin(end()?).stdout(end()?).stderr(end()?);
        let child = command.spawn().context("starting a program at a terminal")?;
        // The command holds copies of the other end; the terminal does not end while they exist.
        drop(command);
        let mut reader = File::from(controller.try_clone().context("duplicating the terminal")?);
        let (sender, shown) = channel();
        // Reading a terminal blocks; the thread ends with the terminal.
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { controller, shown, text: String::new(), child })
    }

    /// Changes its size, as resizing a window does.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        resize(&self.controller, rows, columns)
    }

    pub fn write(&self, text: &str) -> Result<()> {
        rustix::io::write(&self.controller, text.as_bytes()).context("writing to the terminal")?;
        Ok(())
    }

    /// Waits until it shows `wanted`, and discards the output up to there.
    pub async fn wait_for(&mut self, wanted: &str, limit: Duration) -> Result<()> {
        let found = wait_for(&format!("the terminal to show {wanted:?}"), limit, async || {
            while let Ok(bytes) = self.shown.try_recv() {
                self.text.push_str(&String::from_utf8_lossy(&bytes));
            }
            Ok(self.text.find(wanted))
        })
        .await;
        let at = found.with_context(|| format!("it shows {:?}", self.text))?;
        self.text.drain(..at + wanted.len());
        Ok(())
    }
}

fn resize(terminal: &OwnedFd, rows: u16, columns: u16) -> Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).context("setting the terminal's size")
}
