//! Runs the README's installation without Kubernetes as it is written.
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::cluster::manifests::deploy;
use postern_testbed::document::{blocks, commands};
use postern_testbed::process::{Placement, Process, program};
use postern_testbed::target::Behaviour;
use postern_testbed::wait::wait_for;
use postern_testbed::{Testbed, server};

use crate::common::target;

scenarios! {
    it_works_without_kubernetes(quick),
}

pub(crate) const README: &str = include_str!("../../../README.md");
const TITLE: &str = "Use it without Kubernetes";
const PAGE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 17\r\nConnection: close\r\n\r\nnode_load1 0.25\n\n";

/// `cargo build` is not run: it has made this test's programs already.
async fn it_works_without_kubernetes(testbed: &Testbed) -> Result<()> {
    let commands = commands(README, TITLE)?;
    let lines: Vec<&str> = commands.lines().collect();
    let [build, serve, token, status, scrape] = lines[..] else {
        bail!("{TITLE:?} has {} commands instead of five", lines.len())
    };
    ensure!(build.starts_with("cargo xtask build-ebpf && cargo build"), "first comes {build:?}");
    let serve = serve.strip_suffix(" &").with_context(|| format!("{serve:?} runs in the foreground"))?;
    let folder = folder(testbed)?;
    let _exporter = target(testbed, 1, 9100, Behaviour::Answers(PAGE))?;

    let _server = Process::spawn(testbed.dir(), "server", shell(testbed.on_cloud(), &folder, serve))?;
    let run = |line: &str| -> Result<Output> {
        shell(testbed.on_cloud(), &folder, line).output().with_context(|| format!("running {line:?}"))
    };
    let output = run(status)?;
    ensure!(!output.status.success() || !said(&output).contains("1 of 1"), "the agent is there already");
    let mut shown = wait_for("a token", server::START, async || {
        let output = run(token)?;
        // Until the server has started, its address is not known.
        Ok((output.status.success() && !said(&output).contains("SERVER:10262")).then(|| said(&output)))
    })
    .await?;

    let agent = shown.lines().map(str::trim).find(|line| line.starts_with("tunnel-agent "));
    let agent = format!("target/release/{}", agent.with_context(|| format!("no command in {shown:?}"))?);
    let _agent = Process::spawn(testbed.dir(), "agent", shell(testbed.on_edge(1), &folder, &agent))?;
    shown += &wait_for("the agent in `status`", server::START, async || {
        let output = run(status)?;
        Ok(said(&output).contains("1 of 1 connected").then(|| said(&output)))
    })
    .await?;
    let page = run(scrape)?;
    ensure!(said(&page).contains("node_load1"), "{scrape:?} shows {}", said(&page));
    is_shown(TITLE, &shown)
}

/// Fails unless every line of the section's outputs was printed; `…` stands for parts that differ each time.
pub(crate) fn is_shown(title: &str, shown: &str) -> Result<()> {
    let outputs = blocks(README).into_iter().filter(|block| block.section == title && !block.is_commands());
    are_printed(outputs.map(|block| block.text), shown).with_context(|| format!("the README's {title:?}"))
}

/// The same for these outputs.
pub(crate) fn are_printed<'a>(outputs: impl Iterator<Item = &'a str>, shown: &str) -> Result<()> {
    let expected: Vec<&str> = outputs.flat_map(str::lines).map(str::trim).collect();
    ensure!(!expected.is_empty(), "no output is shown");
    for line in expected {
        let printed = shown.lines().any(|printed| {
            let mut rest = Some(printed);
            for part in line.split('…') {
                rest = rest.and_then(|rest| rest.split_once(part)).map(|(_, after)| after);
            }
            rest.is_some()
        });
        ensure!(printed, "{line:?} was not printed:\n{shown}");
    }
    Ok(())
}

/// Makes a clone with built programs. Wrappers add flags that keep their state, and the redirect, within the test.
fn folder(testbed: &Testbed) -> Result<PathBuf> {
    let dir = fs::canonicalize(testbed.dir()).context("the run's folder")?.join("clone");
    let built = dir.join("target/release");
    fs::create_dir_all(&built).with_context(|| built.display().to_string())?;
    symlink(fs::canonicalize(deploy()).context("deploy/")?, dir.join("deploy")).context("linking deploy")?;
    let state = |name: &str| format!("--state-dir={}", dir.join(name).display());
    let server = format!(
        "case \"$1\" in\nstatus) ;;\ntoken) set -- \"$@\" {state} ;;\n*) set -- \"$@\" {state} --redirect-cgroup={} --bpffs={} ;;\nesac",
        testbed.cloud_cgroup.path().display(),
        testbed.bpffs().display(),
        state = state("server"),
    );
    wrapper(&built.join("tunnel-server"), &server, &program("tunnel-server")?)?;
    let agent = format!("set -- \"$@\" {}", state("agent"));
    wrapper(&built.join("tunnel-agent"), &agent, &program("tunnel-agent")?)?;
    Ok(dir)
}

fn wrapper(path: &Path, flags: &str, program: &Path) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{flags}\nexec {} \"$@\"\n", program.display()))
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .with_context(|| path.display().to_string())
}

fn shell(host: Placement<'_>, folder: &Path, line: &str) -> Command {
    let mut command = host.command("sh".as_ref());
    command.args(["-c", &format!("exec {line}")]).current_dir(folder);
    command
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
