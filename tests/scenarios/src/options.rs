//! Kernels and sandboxes without certain socket options: strace makes each setsockopt(2) fail.
use anyhow::{Result, ensure};
use postern_testbed::process::Process;
use postern_testbed::target::Behaviour;
use postern_testbed::wait::{wait_for, wait_until};
use postern_testbed::{Testbed, agent, client};
use tokio::io::AsyncWriteExt as _;

use crate::common::{server, target};

scenarios! {
    connections_do_without_them(quick),
}

/// Keeps strace's output apart from the program's.
const STRACE: [&str; 7] = [
    "strace",
    "-f",
    "--output=/dev/null",
    "-e",
    "trace=setsockopt",
    "-e",
    "inject=setsockopt:error=ENOPROTOOPT",
];

async fn connections_do_without_them(testbed: &Testbed) -> Result<()> {
    testbed.expect_error("failed to set a socket option");
    let server = server(testbed).await?;
    // Only after it listens: without SO_REUSEADDR it would not.
    let mut command = testbed.on_cloud().command(STRACE[0].as_ref());
    command.args(&STRACE[1..]).args(["-p", &server.process.pid().to_string()]);
    let strace = Process::spawn(testbed.dir(), "strace", command)?;
    wait_for("strace to follow the server", agent::START, async || {
        Ok(strace.output()?.contains("attached").then_some(()))
    })
    .await?;
    // Without an admin port it has no listener.
    let builder = agent::Builder::new(&server, 1).flag("--admin-address=127.0.0.1:0");
    let agent = builder.below(STRACE)?.enrol(&server).await?;

    let on_edge = target(testbed, 1, 9100, Behaviour::Echo)?;
    let mut stream = client::hold(on_edge.address, b"without any option").await?;
    stream.shutdown().await?;
    let end = client::end_of(&mut stream, client::PATIENCE).await?;
    // The listener has got SO_LINGER before, which its connection has inherited and cannot undo.
    ensure!(matches!(end, client::End::Eof(0) | client::End::Reset), "the connection ended with {end:?}");
    for option in ["TCP_NODELAY", "TCP_NOTSENT_LOWAT", "TCP_USER_TIMEOUT", "SO_KEEPALIVE", "SO_LINGER"] {
        for program in [&server.process, &agent.process] {
            let times = async || {
                let log = program.output()?;
                let failures = log.lines().filter(|line| line.contains("failed to set a socket option"));
                Ok(failures.filter(|line| line.contains(option)).count())
            };
            let what = format!("{} to name {option} once", program.name());
            wait_until(&what, client::PATIENCE, times, |times| *times == 1).await?;
        }
    }
    Ok(())
}
