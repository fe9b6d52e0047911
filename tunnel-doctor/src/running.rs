//! State of a running program, as reported by its admin endpoints.

use std::net::SocketAddr;

use clap::Parser;
use http::{Method, StatusCode};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use tunnel_runtime::admin::client::{ClientError, DEADLINE, fetch, request};
use tunnel_runtime::config::value::ListenAddress;
use tunnel_runtime::limits::in_pod;

use super::checkup::{Checkup, Finding, Outcome};
use super::codes;
use super::limits::judge_limits;

/// Answers of the admin endpoints.
#[derive(Clone, Debug)]
pub struct Running<T> {
    pub status: T,
    /// Pending parts, if it is not ready.
    pub pending: Option<String>,
    pub metrics: String,
    /// Its flags; `None` if its version does not report them.
    pub flags: Option<Vec<String>>,
}

async fn ask<T: DeserializeOwned>(address: SocketAddr) -> Result<Running<T>, ClientError> {
    let get = async |path: &str| request(DEADLINE, address, Method::GET, path, Bytes::new()).await;
    let ready = get("/readyz").await?;
    let config = get("/config").await?;
    Ok(Running {
        status: fetch(address, "/status").await?,
        pending: (ready.status != StatusCode::OK).then(|| ready.text().trim().to_owned()),
        metrics: get("/metrics").await?.text().to_owned(),
        flags: serde_json::from_slice(&config.body).ok().filter(|_| config.status == StatusCode::OK),
    })
}

/// The answers, or the reason for having none.
pub type Asked<T> = Result<Running<T>, String>;

/// Queries the program at this `--admin-address`.
pub async fn ask_at<T: DeserializeOwned>(admin_address: ListenAddress) -> Asked<T> {
    let asked = async { ask(admin_address.ok_or(ClientError::Off)?).await };
    asked.await.map_err(|error| error.to_string())
}

/// Parses the flags of a running program. `None` if there are flags unknown to this version.
pub fn parse_flags<'a, C: Parser>(flags: impl IntoIterator<Item = &'a String>) -> Option<C> {
    C::try_parse_from(std::iter::once("program").chain(flags.into_iter().map(String::as_str))).ok()
}

/// Adds the checks `running`, `ready` and `limits` of a program. `start` is the command that starts it.
pub fn check_running<T>(
    checkup: &mut Checkup,
    running: &Asked<T>,
    start: &str,
    version: impl Fn(&T) -> String,
) {
    let running = match running {
        Ok(running) => running,
        Err(reason) => {
            checkup.add("running", Finding::new(&codes::NOT_RUNNING, reason, start).into());
            for check in ["ready", "limits"] {
                checkup.add(check, Outcome::Skipped("the program does not run".to_owned()));
            }
            return;
        }
    };
    checkup.add("running", Outcome::fine(version(&running.status)));
    let ready = match &running.pending {
        None => Outcome::fine("yes"),
        Some(pending) => {
            let fix = "see the findings below and the end of its log, which says what it waits for";
            Finding::new(&codes::NOT_READY, pending, fix).into()
        }
    };
    checkup.add("ready", ready);
    checkup.add("limits", judge_limits(&running.metrics, in_pod()));
}

/// Returns a metric without labels from the text of `/metrics`.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.split(' ').next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::Arc;

    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::registry::Registry;
    use tunnel_runtime::admin::Admin;
    use tunnel_runtime::lifecycle::Readiness;
    use tunnel_runtime::logging;
    use tunnel_runtime::settled::Settling;

    use super::super::checkup::State;
    use super::*;

    #[tokio::test]
    async fn a_running_program_is_asked_and_one_that_waits_is_found() {
        let (mut registry, readiness) = (Registry::default(), Readiness::default());
        registry.register("postern_redirect_current", "1 if it is", Gauge::<i64>::default());
        let waiting = readiness.pending("the API server");
        let admin = Admin {
            registry: Arc::new(registry),
            readiness,
            status: Arc::new(|| serde_json::json!({"version": "1.0"})),
            connections: None,
            flags: Arc::new(["--a=b".to_owned()]),
            cluster: None,
            bench: None,
            pages: &[],
            log: logging::Handle::detached(),
            settling: Settling::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = admin.serve(listener).unwrap();
        let asked = async || ask_at::<serde_json::Value>(Some(address)).await;
        let judge = |running: &Asked<serde_json::Value>| {
            let mut checkup = Checkup::default();
            let version = |status: &serde_json::Value| status["version"].to_string();
            check_running(&mut checkup, running, "systemctl start it", version);
            let checks = checkup.report("it", "1.0").checks;
            let code = |at: usize| match checks[at].state {
                State::Skipped => "skipped",
                _ => checks[at].findings.first().map_or("", |finding| finding.code),
            };
            [code(0), code(1)]
        };
        let running = asked().await;
        assert_eq!(judge(&running), ["", "not-ready"]);
        let running = running.unwrap();
        assert_eq!(running.pending.as_deref(), Some("pending: the API server"));
        assert_eq!(running.flags, Some(vec!["--a=b".to_owned()]));
        assert_eq!(metric(&running.metrics, "postern_redirect_current"), Some(0.0), "{}", running.metrics);
        assert_eq!(metric(&running.metrics, "postern_redirect"), None);
        drop(waiting);
        assert_eq!(judge(&asked().await), ["", ""]);
        drop(serving);
        assert_eq!(judge(&asked().await), ["not-running", "skipped"]);
    }
}
