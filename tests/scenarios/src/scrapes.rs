//! The metrics listener: curl and a real Prometheus read the metrics of servers and redirectors from another host.
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use postern_testbed::server::{Builder, Server};
use postern_testbed::wait::wait_until;
use postern_testbed::{CLOUD, NEIGHBOUR, Testbed, client, prometheus};

use crate::connect::write;
use crate::redirector::{enrolled, token};
use crate::web::{Answer, Authority, curl, shown};

scenarios! {
    callers_read_metrics_by_token_or_certificate(quick),
    one_source_does_not_take_the_listener,
    a_successor_answers_at_once(limit = 180),
    prometheus_reads_a_server_and_a_redirector(limit = 180),
}

const PORT: u16 = 10269;
const TOKENS: &str = "prometheus-token,prometheus,1\n";
const SOON: Duration = Duration::from_secs(20);
/// A text in the listener's answer.
const METRIC: &str = "postern_build_info{";

fn tokens(testbed: &Testbed, text: &str) -> Result<PathBuf> {
    write(testbed, "scrapers.csv", text)
}

fn with_listener<'a>(testbed: &Testbed, builder: Builder<'a>) -> Result<Builder<'a>> {
    let tokens = tokens(testbed, TOKENS)?;
    let port = format!("--metrics-port={PORT}");
    Ok(builder.flag(port).flag(format!("--token-auth-file={}", tokens.display())))
}

/// Runs curl against the listener; the server's certificate is verified.
async fn ask(testbed: &Testbed, args: &[&str]) -> Result<Answer> {
    let ca = shown(&testbed.dir().join("server/ca/ca.crt"));
    let url = format!("https://{CLOUD}:{PORT}/metrics");
    curl(testbed, &[&["--cacert", &ca, &url][..], args].concat()).await
}

async fn ask_with(testbed: &Testbed, token: &str) -> Result<Answer> {
    ask(testbed, &["--header", &format!("Authorization: Bearer {token}")]).await
}

async fn callers_read_metrics_by_token_or_certificate(testbed: &Testbed) -> Result<()> {
    let (callers, others) = (Authority::new(testbed, "callers")?, Authority::new(testbed, "another-ca")?);
    let server = with_listener(testbed, Builder::new(testbed))?
        .flag(format!("--client-ca-file={}", shown(&callers.file())))
        .flag("--terminate-tls=off")
        .start()
        .await?;
    ask_with(testbed, "prometheus-token").await?.expect(200, METRIC)?;
    let by_certificate = async |authority: &Authority, name: &str| {
        let (certificate, key) = authority.client(name)?;
        ask(testbed, &["--cert", &shown(&certificate), "--key", &shown(&key)]).await
    };
    by_certificate(&callers, "scraper").await?.expect(200, METRIC)?;
    let nobody = by_certificate(&others, "nobody").await?;
    ensure!(!nobody.ok && nobody.status == 0, "another CA's certificate was taken: {nobody:?}");

    ask(testbed, &[]).await?.expect(401, "a client certificate or a bearer token is needed")?;
    let wrong = ask_with(testbed, "wrong-token").await?;
    wrong.expect(401, "the token is not in --token-auth-file")?;
    ensure!(!wrong.body.contains("wrong-token"), "{wrong:?}");
    ask(testbed, &["--request", "PUT"]).await?.expect(405, "use GET")?;
    let status = format!("https://{CLOUD}:{PORT}/status");
    curl(testbed, &["--insecure", &status]).await?.expect(404, "only /metrics is here")?;
    let plain = curl(testbed, &[&format!("http://{CLOUD}:{PORT}/metrics")]).await?;
    ensure!(!plain.ok && plain.status == 0, "without TLS: {plain:?}");

    // The same from an operator's view: metrics, log and status.
    let listener = [("listener", "metrics")];
    server.wait_metric("postern_callers_refused_total", &listener, |refused| refused >= 3.0).await?;
    server.wait_metric("postern_connections_total", &listener, |count| count >= 2.0).await?;
    server.wait_log("a client certificate or a bearer token is needed").await?;
    ensure!(!server.settled_log().await?.contains("wrong-token"), "the log has a token");
    let status = server.status().await?;
    let listeners = status["listeners"].as_array().context("no listeners")?;
    ensure!(listeners.iter().any(|listener| listener["name"] == "metrics"), "{status}");

    // The token is replaced by another one.
    tokens(testbed, "another-prometheus-token,prometheus,1\n")?;
    let other = async || ask_with(testbed, "another-prometheus-token").await;
    wait_until("the new token to be known", SOON, other, |answer| answer.status == 200).await?;
    ask_with(testbed, "prometheus-token").await?.expect(401, "not in --token-auth-file")
}

async fn one_source_does_not_take_the_listener(testbed: &Testbed) -> Result<()> {
    let server = with_listener(testbed, Builder::new(testbed))?.start().await?;
    let mut held = Vec::new();
    for _ in 0..40 {
        // Over the limit, connect() itself may get the reset.
        held.extend(client::connect((CLOUD, PORT)).await);
    }
    ensure!(!held.is_empty(), "no connection was taken");
    let bound = [("listener", "metrics"), ("reason", "source")];
    server.wait_metric("postern_connections_over_limit_total", &bound, |refused| refused > 0.0).await?;
    // Another source has its own share. The certificate includes this host's addresses.
    let ca = shown(&testbed.dir().join("server/ca/ca.crt"));
    let local = format!("https://127.0.0.1:{PORT}/metrics");
    let token = "Authorization: Bearer prometheus-token";
    curl(testbed, &["--cacert", &ca, &local, "--header", token]).await?.expect(200, METRIC)?;
    drop(held);
    let again = async || ask_with(testbed, "prometheus-token").await;
    wait_until("the source to have its places again", SOON, again, |answer| answer.status == 200).await?;
    Ok(())
}

async fn a_successor_answers_at_once(testbed: &Testbed) -> Result<()> {
    let mut first = with_listener(testbed, Builder::new(testbed))?.flag("--drain-timeout=5s").start().await?;
    let asking = async {
        let mut asked = 0;
        loop {
            let answer = ask_with(testbed, "prometheus-token").await?;
            answer.expect(200, METRIC).with_context(|| format!("after {asked} answers"))?;
            asked += 1;
        }
    };
    let second: Server<'_> = tokio::select! {
        second = first.take_over() => second?,
        failed = asking => { let failed: Result<()> = failed; return failed; }
    };
    let ended = first.process.wait_exit(SOON).await?;
    ensure!(ended.code() == Some(0), "the first server ended with {ended}");
    ask_with(testbed, "prometheus-token").await?.expect(200, METRIC)?;
    // Counted at the connection's end, which the server notices after its client.
    let listener = [("listener", "metrics")];
    second.wait_metric("postern_connections_total", &listener, |answered| answered > 0.0).await?;
    Ok(())
}

/// The server is on a different host than Prometheus, as in a cluster; the redirector is on Prometheus' host.
async fn prometheus_reads_a_server_and_a_redirector(testbed: &Testbed) -> Result<()> {
    let neighbour = testbed.add_neighbour()?;
    let server = with_listener(testbed, Builder::alone_on_neighbour(testbed, &neighbour))?.start().await?;
    let redirector = enrolled(Builder::new(testbed), "cloud-1", &token(&server, "cloud-1")?);
    let _redirector = with_listener(testbed, redirector)?.start().await?;
    let ca = testbed.dir().join("neighbour/ca/ca.crt");
    // The redirector's certificate names its node and is signed by no CA.
    let url = format!("https://{CLOUD}:{PORT}/metrics");
    let verified = curl(testbed, &["--cacert", &shown(&ca), &url]).await?;
    ensure!(!verified.ok && verified.status == 0, "the redirector's certificate was verified: {verified:?}");
    let unverified = curl(testbed, &["--insecure", "--verbose", &url]).await?;
    unverified.expect(401, "a client certificate or a bearer token is needed")?;
    ensure!(unverified.said.contains("CN=cloud-1"), "{unverified:?}");
    let job = |name: &str, host: &str, token: &str, tls: &str| {
        format!(
            "- job_name: {name}\n  scheme: https\n  authorization: {{credentials: {token}}}\n  \
             tls_config: {{{tls}}}\n  static_configs:\n  - targets: ['{host}:{PORT}']\n"
        )
    };
    let verified = format!("ca_file: {}, server_name: tunnel-server.postern.internal", ca.display());
    let (neighbour, cloud) = (NEIGHBOUR.to_string(), CLOUD.to_string());
    let configuration = [
        "global:\n  scrape_interval: 1s\nscrape_configs:\n".to_owned(),
        job("tunnel-server", &neighbour, "prometheus-token", &verified),
        job("tunnel-redirector", &cloud, "prometheus-token", "insecure_skip_verify: true"),
        job("nobody", &neighbour, "wrong-token", &verified),
    ]
    .concat();
    let _prometheus = prometheus::start(testbed, &configuration)?;
    for (name, role) in [("tunnel-server", "server"), ("tunnel-redirector", "redirector")] {
        let up = async || {
            let up = format!("sum_over_time(up{{job=\"{name}\"}}[1m])");
            let series = prometheus::query(&up).await.unwrap_or_default();
            Ok(series.first().map_or(0.0, prometheus::Series::number))
        };
        wait_until(&format!("{name} to be up in Prometheus"), 2 * SOON, up, |scrapes| *scrapes >= 2.0)
            .await?;
        let series = prometheus::samples(&format!("postern_role{{job=\"{name}\"}}")).await?;
        let shown: Vec<_> = series.iter().map(|series| series.label("role")).collect();
        ensure!(shown == [role], "{name} says that it is {shown:?}");
    }
    let nobody = async || {
        let targets = prometheus::targets().await?;
        let Some(target) = targets.into_iter().find(|target| target.job == "nobody") else {
            bail!("no target of the job nobody")
        };
        Ok(target.health)
    };
    wait_until("nobody to be let in", SOON, nobody, |health| health.contains("401")).await?;
    Ok(())
}
