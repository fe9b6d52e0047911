use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent;
use postern_testbed::process::program;
use postern_testbed::{Testbed, agent::Agent};

use crate::common::server;

scenarios! {
    bundles_have_all_but_the_secrets(quick),
}

const PASSWORD: &str = "correct-horse";

async fn bundles_have_all_but_the_secrets(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let token = server.token("edge-1")?;
    let mut secrets = vec![token.token.clone(), PASSWORD.to_owned()];
    secrets.extend(token.token.split_once('.').map(|(_, secret)| secret.to_owned()));
    let agent = agent::Builder::new(&server, 1)
        .token(token.clone())
        .env("HTTPS_PROXY", &format!("http://user:{PASSWORD}@192.168.50.1:3128"))
        .env("NO_PROXY", "10.70.0.0/16")
        .spawn()?;
    server.wait_connected("edge-1", true, agent::START).await?;
    secrets.extend(keys(&testbed.dir().join("server"))?);
    secrets.extend(keys(&agent.state_dir())?);
    ensure!(secrets.len() > 6, "{} secrets", secrets.len());

    // A log that contains secrets.
    let careless = testbed.dir().join("careless.log");
    let key = fs::read_to_string(agent.state_dir().join("agent.key"))?;
    fs::write(&careless, format!("first line\nstarted with {}\n{key}last line\n", token.token))?;
    let log = format!("--log={}", careless.display());

    let mut on_server = testbed.on_cloud().command(&program("tunnel-server")?);
    let parts = bundle(testbed, "of-server", on_server.arg("bundle").arg(&log)).await?;
    expect(
        &parts,
        &secrets,
        &["edge-1", "postern_tunnels 1", "--redirect-ports=10250,", "ok       self-test"],
    )?;
    let mut on_node = testbed.on_edge(1).command(&program("tunnel-agent")?);
    let parts = bundle(testbed, "of-agent", on_node.arg("bundle").arg(&log)).await?;
    let words = ["edge-1", "--proxy=http://192.168.50.1:3128", "agent.key", "last line"];
    expect(&parts, &secrets, &words)?;

    // As through kubectl: from standard input to standard output.
    let file = testbed.dir().join("piped.tar.gz");
    let mut piped = testbed.on_edge(1).command(&program("tunnel-agent")?);
    piped.args(["bundle", "--log=-", "--file=-"]).stdin(File::open(&careless)?).stdout(File::create(&file)?);
    let output = piped.output().context("writing the bundle to standard output")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success() && said.contains("log-1.txt: the log from standard input"), "{said}");
    expect(&unpacked(testbed, "piped", &said)?, &secrets, &words)?;
    still_runs(agent)
}

fn still_runs(mut agent: Agent<'_>) -> Result<()> {
    ensure!(agent.process.ended()?.is_none(), "the agent has ended");
    Ok(())
}

/// Returns the lines of every private key below a directory.
fn keys(dir: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(keys(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "key") {
            let text = fs::read_to_string(&path)?;
            found.extend(text.lines().filter(|line| !line.starts_with("-----")).map(str::to_owned));
        }
    }
    Ok(found)
}

/// Writes a bundle and returns all its parts.
async fn bundle(testbed: &Testbed, name: &str, command: &mut Command) -> Result<String> {
    let file = testbed.dir().join(format!("{name}.tar.gz"));
    command.arg(format!("--file={}", file.display()));
    let output = command.output().context("writing the bundle")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    unpacked(testbed, name, &said)
}

/// Returns all parts of the bundle NAME.tar.gz; `said` is the output of its command.
fn unpacked(testbed: &Testbed, name: &str, said: &str) -> Result<String> {
    let (file, dir) = (testbed.dir().join(format!("{name}.tar.gz")), testbed.dir().join(name));
    fs::create_dir(&dir)?;
    let unpacked = Command::new("tar").arg("xzf").arg(&file).arg("-C").arg(&dir).status()?;
    ensure!(unpacked.success(), "tar ended with {unpacked}");
    let folder: PathBuf = fs::read_dir(&dir)?.next().context("an empty bundle")??.path();
    let mut text = String::new();
    for part in [
        "manifest.txt",
        "doctor.txt",
        "doctor.json",
        "status.json",
        "metrics.txt",
        "readyz.txt",
        "flags.txt",
        "state-directory.txt",
        "log-1.txt",
        "kernel.txt",
        "network.txt",
    ] {
        let content = fs::read_to_string(folder.join(part)).with_context(|| format!("{part} in {said}"))?;
        ensure!(!content.is_empty(), "{part} is empty");
        text += &content;
    }
    ensure!(text.contains(said.lines().next().unwrap_or_default()), "{said}");
    Ok(text)
}

fn expect(parts: &str, secrets: &[String], words: &[&str]) -> Result<()> {
    for secret in secrets {
        ensure!(!parts.contains(secret.as_str()), "a secret of {} letters is in the bundle", secret.len());
    }
    for word in words {
        ensure!(parts.contains(word), "{word} is not in the bundle");
    }
    Ok(())
}
