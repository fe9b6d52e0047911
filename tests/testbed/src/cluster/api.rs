//! The cluster's API, as its administrator: plain paths and JSON.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use http::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::Value;

use crate::wait::wait_for;

/// A client with the administrator's certificate.
#[derive(Clone)]
pub struct Api {
    client: kube::Client,
}

impl Api {
    /// Reads the kubeconfig; sends no request.
    pub async fn open(kubeconfig: &Path) -> Result<Self> {
        let file = Kubeconfig::read_from(kubeconfig).context("reading the kubeconfig")?;
        let mut config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .context("using the kubeconfig")?;
        config.connect_timeout = Some(Duration::from_secs(5));
        config.read_timeout = Some(Duration::from_secs(20));
        Ok(Self { client: kube::Client::try_from(config).context("making a client")? })
    }

    /// Gets a path; the body as text.
    pub async fn text(&self, path: &str) -> Result<String> {
        let request = Request::get(path).body(Vec::new()).context("building the request")?;
        self.client.request_text(request).await.with_context(|| format!("GET {path}"))
    }

    /// Gets an object or list.
    pub async fn get(&self, path: &str) -> Result<Value> {
        let request = Request::get(path).body(Vec::new()).context("building the request")?;
        self.client.request(request).await.with_context(|| format!("GET {path}"))
    }

    /// Gets an object; None if it does not exist.
    pub async fn find(&self, path: &str) -> Result<Option<Value>> {
        let request = Request::get(path).body(Vec::new()).context("building the request")?;
        match self.client.request(request).await {
            Ok(value) => Ok(Some(value)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(error).with_context(|| format!("GET {path}")),
        }
    }

    pub async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.send(Method::POST, path, "application/json", object).await
    }

    pub async fn replace(&self, path: &str, object: &Value) -> Result<Value> {
        self.send(Method::PUT, path, "application/json", object).await
    }

    /// Changes fields by a merge patch.
    pub async fn patch(&self, path: &str, change: &Value) -> Result<Value> {
        self.send(Method::PATCH, path, "application/merge-patch+json", change).await
    }

    /// Deletes an object that may be gone already.
    pub async fn delete(&self, path: &str) -> Result<()> {
        let request = Request::delete(path).body(Vec::new()).context("building the request")?;
        match self.client.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            other => other.map(|_| ()).with_context(|| format!("DELETE {path}")),
        }
    }

    async fn send(&self, method: Method, path: &str, kind: &str, body: &Value) -> Result<Value> {
        let what = format!("{method} {path}");
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind)
            .body(body.to_string().into_bytes())
            .context("building the request")?;
        self.client.request(request).await.context(what)
    }

    /// Waits until an object exists and `accept` returns true for it.
    pub async fn wait(
        &self,
        what: &str,
        path: &str,
        limit: Duration,
        accept: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let mut last = None;
        let found = wait_for(what, limit, async || {
            // A restarting API server refuses connections for a moment.
            let seen = self.find(path).await;
            let fits = seen.as_ref().is_ok_and(|object| object.as_ref().is_some_and(&accept));
            if fits {
                return seen;
            }
            last = Some(seen);
            Ok(None)
        })
        .await;
        found.with_context(|| match &last {
            Some(Ok(Some(object))) => {
                format!("{path}: status {} of {}", object["status"], object["metadata"]["name"])
            }
            Some(Ok(None)) => format!("{path} does not exist"),
            Some(Err(error)) => format!("{path}: {error:#}"),
            None => path.to_owned(),
        })
    }
}

/// Reports whether an object's condition of that type is True.
pub fn is_true(object: &Value, condition: &str) -> bool {
    self::condition(object, condition).is_some_and(|found| found["status"] == "True")
}

/// Returns an object's condition of that type.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}
