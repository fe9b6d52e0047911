//! State directories on full and read-only disks.
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::{self, Builder};
use postern_testbed::authority::Authority;
use postern_testbed::client::visit;
use postern_testbed::process::Process;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_for;
use rcgen::KeyPair;

use crate::common::{server, target};
use crate::identity::{EXPIRES, renewed_soon};

scenarios! {
    an_agent_without_a_writable_disk_stays_reachable(waits, limit = 240, quick),
}

/// A tmpfs that only processes in its mount namespace see.
struct Disk {
    keeper: Process,
    path: PathBuf,
}

impl Disk {
    async fn mount(testbed: &Testbed, path: &Path) -> Result<Self> {
        fs::create_dir_all(path)?;
        let mut command = testbed.on_edge(1).command("unshare".as_ref());
        command.args(["--mount", "--propagation=private", "sh", "-c"]);
        command.arg(
            r#"mount -t tmpfs -o size=256k,mode=700 disk "$0" && touch "$0/mounted" && exec sleep infinity"#,
        );
        command.arg(path);
        let disk = Self { keeper: Process::spawn(testbed.dir(), "disk", command)?, path: path.to_owned() };
        let mounted = disk.file("mounted");
        wait_for("the disk to be mounted", agent::START, async || Ok(mounted.exists().then_some(()))).await?;
        Ok(disk)
    }

    /// Returns the path of a file on the disk, as seen by this process.
    fn file(&self, name: &str) -> PathBuf {
        let relative = self.path.strip_prefix("/").unwrap_or(&self.path);
        Path::new(&format!("/proc/{}/root", self.keeper.pid())).join(relative).join(name)
    }

    fn fill(&self) -> Result<()> {
        let mut file = File::create(self.file("fill"))?;
        loop {
            match file.write_all(&[1; 512]) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error).context("filling the disk"),
            }
        }
    }

    fn remount(&self, option: &str) -> Result<()> {
        let status = Command::new("nsenter")
            .arg(format!("--mount=/proc/{}/ns/mnt", self.keeper.pid()))
            .args(["mount", "-o", &format!("remount,{option}")])
            .arg(&self.path)
            .status()?;
        ensure!(status.success(), "remount,{option}: {status}");
        Ok(())
    }
}

async fn an_agent_without_a_writable_disk_stays_reachable(testbed: &Testbed) -> Result<()> {
    let mut server = server(testbed).await?;
    let on_edge = target(testbed, 1, 10250, Behaviour::Echo)?;
    let builder = Builder::new(&server, 1);
    let disk = Disk::mount(testbed, &builder.state_dir()).await?;
    let mut agent = builder.mounts_of(disk.keeper.pid()).token(server.token("edge-1")?).spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;

    agent.crash(&server).await?;
    let key = KeyPair::from_pem(&fs::read_to_string(disk.file("agent.key"))?).context("agent.key")?;
    let valid = renewed_soon();
    let end = valid.end;
    let old = Authority::open(&testbed.dir().join("server"))?.agent("edge-1", &key, valid)?;
    fs::write(disk.file("agent.crt"), &old)?;
    testbed.expect_error("No space left on device");
    testbed.expect_error("failed to store the new certificate or trusted roots, retrying");
    disk.fill()?;
    agent.return_to(&server).await?;
    visit(on_edge.address).await?;
    let (name, renewed) = ("postern_agent_certificate_renewals_total", [("outcome", "renewed")]);
    agent.wait_metric_for(Duration::from_secs(60), name, &renewed, |count| count > 0.0).await?;
    ensure!(fs::read_to_string(disk.file("agent.crt"))? == old, "the disk was not full");
    // With the old certificate it could no longer attach.
    wait_for("the old certificate to expire", 2 * EXPIRES, async || {
        Ok((SystemTime::now() > end).then_some(()))
    })
    .await?;
    server.process.crash().await?;
    server.start_again().await?;
    server.wait_connected("edge-1", true, agent::START).await?;
    visit(on_edge.address).await?;

    fs::remove_file(disk.file("fill"))?;
    wait_for("the new certificate to be stored", Duration::from_secs(60), async || {
        Ok((fs::read_to_string(disk.file("agent.crt"))? != old).then_some(()))
    })
    .await?;
    testbed.expect_error("Read-only file system");
    disk.remount("ro")?;
    agent.crash(&server).await?;
    agent.return_to(&server).await?;
    visit(on_edge.address).await?;
    Ok(())
}
