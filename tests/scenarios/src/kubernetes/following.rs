//! `kubectl logs -f` of a pod that prints numbered lines.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::cluster::kubectl::Kubectl;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);

/// A running `kubectl logs -f`.
pub(crate) struct Following {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    last: Option<u64>,
}

impl Following {
    pub(crate) async fn start(kubectl: &Kubectl) -> Result<Self> {
        let mut child = kubectl.start(&["logs", "-f", "talker", "--tail=1"])?;
        let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        let mut following = Self { child, lines, last: None };
        following.next(5).await?;
        Ok(following)
    }

    /// Reads `count` consecutive lines.
    pub(crate) async fn next(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            let line = timeout(PATIENCE, self.lines.next_line()).await.context("no line arrived")??;
            let line = line.context("kubectl logs -f ended")?;
            let number: u64 =
                line.trim_start_matches("line ").parse().with_context(|| format!("line {line:?}"))?;
            let last = self.last.replace(number);
            ensure!(last.is_none_or(|last| number == last + 1), "line {last:?} is followed by {number}");
        }
        Ok(())
    }

    /// Waits until kubectl exits. The API server ends its answer cleanly even if the kubelet's is cut off (for exec
    /// too), so the exit code shows nothing, with or without a tunnel.
    pub(super) async fn expect_end(mut self) -> Result<()> {
        let drain = async {
            while self.lines.next_line().await?.is_some() {}
            self.child.wait().await
        };
        timeout(PATIENCE, drain).await.context("kubectl logs -f goes on")??;
        Ok(())
    }
}
