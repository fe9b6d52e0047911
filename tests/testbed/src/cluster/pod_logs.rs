//! Keeps the logs of Postern's pods with those of the run's other programs.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Interval at which new logs are looked for: much shorter than the time for which a pod takes to end.
const PERIOD: Duration = Duration::from_millis(100);
/// How the names of Postern's pods begin, after their namespace.
const PODS: &str = "tunnel-";

/// Keeps them until it is dropped.
#[derive(Debug)]
pub(super) struct PodLogs {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PodLogs {
    /// `dir` is the run's folder.
    pub(super) fn keep(dir: &Path) -> Result<Self> {
        let dir = dir.to_owned();
        let (stop, stopped) = mpsc::channel();
        let keep = move || {
            loop {
                let over = !matches!(stopped.recv_timeout(PERIOD), Err(RecvTimeoutError::Timeout));
                if let Err(error) = link_all(&dir) {
                    // Judged as a program's: without them a panic would pass.
                    let line = format!(
                        r#"{{"level":"ERROR","message":"failed to keep the logs of pods: {error}"}}"#
                    );
                    fs::write(dir.join("logs/pod-logs.log"), line).ok();
                    return;
                }
                if over {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("pod-logs".to_owned()).spawn(keep).context("pod-logs")?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for PodLogs {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Gives each log a second name, which stays when the kubelet removes the pod, and leads to what is written later.
fn link_all(dir: &Path) -> io::Result<()> {
    for host in below(&dir.join("hosts"))? {
        for pod in below(&host.join("var/log/pods"))? {
            if !name(&pod).split_once('_').is_some_and(|(_, pod)| pod.starts_with(PODS)) {
                continue;
            }
            for container in below(&pod)? {
                for log in
                    below(&container)?.iter().filter(|log| log.extension().is_some_and(|end| end == "log"))
                {
                    let parts = [name(&host), name(&pod), name(&container), name(log)];
                    match fs::hard_link(log, dir.join("logs").join(parts.join("_"))) {
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                        // The pod has gone this moment.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        linked => linked?,
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns what is in a folder; nothing if it is not there.
fn below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Id, Kind};

    #[test]
    fn logs_of_pods_outlive_these() {
        let dir = Id::new(Kind::Test).dir();
        let pods = dir.join("hosts/edge-1/var/log/pods");
        let of = |pod: &str, container: &str| pods.join(format!("kube-system_{pod}_uid")).join(container);
        let (agent, other) = (of("tunnel-agent-x", "tunnel-agent"), of("talker", "main"));
        for folder in [&agent, &other, &dir.join("logs")] {
            fs::create_dir_all(folder).unwrap();
        }
        let kept = PodLogs::keep(&dir).unwrap();
        fs::write(agent.join("0.log"), "first\n").unwrap();
        fs::write(other.join("0.log"), "not ours\n").unwrap();
        let linked = dir.join("logs/edge-1_kube-system_tunnel-agent-x_uid_tunnel-agent_0.log");
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while !linked.exists() {
            assert!(std::time::Instant::now() < deadline, "it is not kept");
            thread::yield_now();
        }
        let mut log = fs::File::options().append(true).open(agent.join("0.log")).unwrap();
        fs::remove_dir_all(&agent).unwrap();
        io::Write::write_all(&mut log, b"last\n").unwrap();
        drop(kept);
        let (text, count) = (fs::read_to_string(&linked), fs::read_dir(dir.join("logs")).unwrap().count());
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!((text.unwrap().as_str(), count), ("first\nlast\n", 1));
    }
}
