use anyhow::{Context as _, Result, ensure};
use postern_testbed::agent::{self, Agent};
use postern_testbed::process::program;
use postern_testbed::report::figure;
use postern_testbed::{Testbed, wan};
use serde_json::Value;

use crate::common::server;

scenarios! {
    the_way_to_an_agent_is_measured,
    an_agent_that_takes_no_part_says_so(quick),
}

/// Round-trip time of the path below, in milliseconds.
const ROUND_TRIP: f64 = 40.0;

/// Runs `tunnel-server bench` on the cloud host: exit code, standard output and error.
async fn bench(testbed: &Testbed, args: &[&str]) -> Result<(i32, String, String)> {
    let mut command = testbed.on_cloud().command(&program("tunnel-server")?);
    command.arg("bench").args(args);
    let output = tokio::task::spawn_blocking(move || command.output()).await?.context("running bench")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code().context("killed")?, text(&output.stdout), text(&output.stderr)))
}

async fn the_way_to_an_agent_is_measured(testbed: &Testbed) -> Result<()> {
    let _wan = testbed.wan(1, wan::Path::new(40, 100))?;
    let server = server(testbed).await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let (code, out, error) = bench(testbed, &["edge-1", "-o", "json"]).await?;
    ensure!(code == 0, "{code}: {out}{error}");
    let report: Value = serde_json::from_str(&out).with_context(|| format!("not JSON: {out}"))?;
    let times: Vec<f64> =
        report["rtt_ms"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    let least = times.iter().copied().reduce(f64::min).context("no round trips")?;
    ensure!(times.len() >= 3 && least >= ROUND_TRIP, "{times:?}");
    for (rate, bytes) in [("to_node_mb_s", "to_node_bytes"), ("from_node_mb_s", "from_node_bytes")] {
        let (rate, bytes) = (report[rate].as_f64(), report[bytes].as_u64());
        ensure!(
            rate.is_some_and(|rate| rate > 0.1) && bytes.is_some_and(|bytes| bytes > 100_000),
            "{report:#}"
        );
    }
    // The kernel has measured a delivery rate: bytes were really sent over the link.
    let session = &server.status().await?["nodes"][0]["session"];
    let relayed = session["links"][0]["delivery_rate"].as_u64();
    ensure!(relayed.is_some_and(|rate| rate > 0), "{session}");
    figure(&format!("bench over {ROUND_TRIP} ms: {out}").replace('\n', " "));
    let (code, out, error) = bench(testbed, &["edge-1"]).await?;
    ensure!(code == 0 && out.contains("round trip") && out.contains("limited by"), "{out}{error}");
    // The number of runs per minute is limited. On a busy machine the first ones may be a minute ago when it is reached.
    let mut refused = String::new();
    for _ in 0..8 {
        let (code, _, error) = bench(testbed, &["edge-1"]).await?;
        if code != 0 {
            refused = error;
            break;
        }
    }
    ensure!(refused.contains("12 measurements have begun within a minute"), "{refused}");
    Ok(())
}

async fn an_agent_that_takes_no_part_says_so(testbed: &Testbed) -> Result<()> {
    let server = server(testbed).await?;
    let (code, _, error) = bench(testbed, &["edge-1"]).await?;
    ensure!(code == 1 && error.contains("no agent of edge-1 is attached"), "{code}: {error}");
    let _agent = agent::Builder::new(&server, 1).flag("--bench=off").enrol(&server).await?;
    let (code, out, error) = bench(testbed, &["edge-1"]).await?;
    ensure!(
        code == 1 && error.contains("takes part in no measurements (--bench=off)"),
        "{code}: {out}{error}"
    );
    Ok(())
}
