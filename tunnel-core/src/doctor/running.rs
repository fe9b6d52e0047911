//! What a running program says of itself.

use std::net::SocketAddr;

use http::{Method, StatusCode};
use hyper::body::Bytes;
use serde::de::DeserializeOwned;

use super::checkup::{Finding, Outcome};
use super::codes;
use crate::admin::client::{ClientError, fetch, request};

/// The answers of its admin endpoints.
#[derive(Clone, Debug)]
pub struct Running<T> {
    pub status: T,
    /// Why it is not ready.
    pub pending: Option<String>,
    pub metrics: String,
    /// Its flags; None if it is too old to say them.
    pub flags: Option<Vec<String>>,
}

/// Asks the program at this `--admin-address`.
///
/// # Errors
/// Nobody answers, or not as this version expects.
pub async fn ask<T: DeserializeOwned>(address: SocketAddr) -> Result<Running<T>, ClientError> {
    let get = async |path: &str| request(address, Method::GET, path, Bytes::new()).await;
    let ready = get("/readyz").await?;
    let config = get("/config").await?;
    Ok(Running {
        status: fetch(address, "/status").await?,
        pending: (ready.status != StatusCode::OK).then(|| ready.text().trim().to_owned()),
        metrics: get("/metrics").await?.text().to_owned(),
        flags: serde_json::from_slice(&config.body).ok().filter(|_| config.status == StatusCode::OK),
    })
}

/// The checks `running` and `ready` of a program and its start command.
pub fn judge_running<T>(
    running: &Result<Running<T>, String>,
    start: &str,
    version: impl Fn(&T) -> String,
) -> (Outcome, Outcome) {
    match running {
        Err(reason) => (
            Finding::new(&codes::NOT_RUNNING, reason, start).into(),
            Outcome::Skipped("the program does not run".to_owned()),
        ),
        Ok(running) => {
            let ready = match &running.pending {
                None => Outcome::fine("yes"),
                Some(pending) => {
                    let fix = "see the findings below and the end of its log, which says what it waits for";
                    Finding::new(&codes::NOT_READY, pending, fix).into()
                }
            };
            (Outcome::fine(version(&running.status)), ready)
        }
    }
}

/// A metric without labels in an OpenMetrics text.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.split(' ').next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::admin::Admin;
    use crate::lifecycle::Readiness;
    use crate::logging;

    #[tokio::test]
    async fn a_running_program_is_asked_and_one_that_waits_is_found() {
        let (mut registry, readiness) = (Registry::default(), Readiness::new());
        registry.register("postern_redirect_current", "1 if it is", Gauge::<i64>::default());
        let waiting = readiness.pending("the API server");
        let admin = Admin {
            registry: Arc::new(registry),
            readiness,
            status: Arc::new(|| serde_json::json!({"version": "1.0"})),
            connections: None,
            flags: Arc::new(["--a=b".to_owned()]),
            bench: None,
            pages: &[],
            log: logging::Handle::detached(),
        };
        let serving = admin.bind("--admin-address", "127.0.0.1:0".parse().unwrap()).unwrap().serve().unwrap();
        let asked =
            async || ask::<serde_json::Value>(serving.address()).await.map_err(|error| error.to_string());
        let judge = |running: &Result<Running<serde_json::Value>, String>| {
            let version = |status: &serde_json::Value| status["version"].to_string();
            let (running, ready) = judge_running(running, "systemctl start it", version);
            [running, ready].map(|outcome| match outcome {
                Outcome::Faults(findings) => findings[0].code,
                Outcome::Fine(_) => "",
                Outcome::Skipped(_) => "skipped",
            })
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
        let address = serving.address();
        drop(serving);
        let nobody = ask::<serde_json::Value>(address).await.map_err(|error| error.to_string());
        assert_eq!(judge(&nobody), ["not-running", "skipped"]);
    }
}
