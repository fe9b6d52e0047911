//! Callers' tokens.
use anyhow::{Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::target::Behaviour;

use crate::common::target;
use crate::connect::{ANSWER, POLICY, PORT, TOKENS, curl, listener, write};

scenarios! {
    guessing_is_slowed_down(quick),
}

async fn guessing_is_slowed_down(testbed: &Testbed) -> Result<()> {
    let tokens = write(testbed, "tokens.csv", TOKENS)?;
    let builder = listener(testbed, POLICY)?.flag(format!("--token-auth-file={}", tokens.display()));
    let server = builder.start().await?;
    server.wait_log("tokens of --token-auth-file are short enough to be guessed").await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let _exporter = target(testbed, 1, 9100, Behaviour::Answers(ANSWER))?;
    let proxy = format!("http://127.0.0.1:{PORT}");
    let ask = async |token: &str| {
        curl(testbed, &["-x", &proxy, "-U", &format!("me:{token}"), "-p", "http://edge-1:9100/"]).await
    };
    let expect = async |token: &str, status: &str| {
        let seen = ask(token).await?;
        ensure!(seen.contains(&format!("connect {status}")), "with {token} curl printed {seen:?}");
        anyhow::Ok(())
    };
    expect("alices-token", "200").await?;
    for guess in 0..10 {
        expect(&format!("guess-{guess}"), "407").await?;
    }
    // The answer does not tell if it is right.
    expect("guess-10", "429").await?;
    expect("bobs-token", "429").await?;
    expect("alices-token", "200").await?;
    server.expect_metric("postern_callers_refused_total", &[("listener", "connect")], 12.0).await?;
    server.wait_log("too many tokens from this address had no owner").await
}
