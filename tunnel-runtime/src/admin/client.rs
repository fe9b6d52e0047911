//! Client of the admin endpoints, for the `status` commands.

use std::net::SocketAddr;
use std::time::Duration;

use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;

/// The status of 100,000 nodes takes about 40 MiB.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Time for an answer that needs no measurement.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Reason for having no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("--admin-address: port 0 means that there are no admin endpoints")]
    Off,
    #[error("--admin-address={address}: {reason}; is it running, and with this --admin-address?")]
    Connect { address: SocketAddr, reason: std::io::Error },
    #[error("--admin-address={address}: no answer within {} s", deadline.as_secs())]
    Timeout { address: SocketAddr, deadline: Duration },
    #[error("--admin-address={address}: does not speak HTTP as expected: {reason}")]
    Http { address: SocketAddr, reason: String },
    #[error("--admin-address={address}: {path} answered {status}: {text}")]
    Status { address: SocketAddr, path: String, status: StatusCode, text: String },
    #[error(
        "--admin-address={address}: {path} is not what this version expects ({reason}); is another program there?"
    )]
    Content { address: SocketAddr, path: String, reason: serde_json::Error },
}

/// A complete HTTP response.
#[derive(Debug)]
pub struct AdminResponse {
    pub status: StatusCode,
    pub content_type: Option<String>,
    pub body: Bytes,
}

impl AdminResponse {
    /// Returns the body if it is UTF-8, else an empty string.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap_or_default()
    }
}

/// Sends one request on its own connection.
///
/// # Errors
/// Fails if there is no HTTP response. A response with any status is not an error.
pub async fn request(
    deadline: Duration,
    address: SocketAddr,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<AdminResponse, ClientError> {
    let http = |reason: String| ClientError::Http { address, reason };
    let exchange = async {
        let stream =
            TcpStream::connect(address).await.map_err(|reason| ClientError::Connect { address, reason })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream))
                .await
                .map_err(|e| http(e.to_string()))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, address.to_string())
            .body(Full::new(body))
            .map_err(|e| http(e.to_string()))?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|e| http(e.to_string()))?;
            let status = response.status();
            let content_type = response.headers().get(header::CONTENT_TYPE);
            let content_type = content_type.and_then(|value| value.to_str().ok()).map(str::to_owned);
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES)
                .collect()
                .await
                .map_err(|e| http(e.to_string()))?
                .to_bytes();
            Ok(AdminResponse { status, content_type, body })
        };
        // The connection must be polled for the exchange to proceed, and may end before the exchange has read
        // everything.
        let drive = async {
            drop(connection.await);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answer = exchange => answer,
            () = drive => Err(http("the connection ended".to_owned())),
        }
    };
    tokio::time::timeout(deadline, exchange).await.map_err(|_| ClientError::Timeout { address, deadline })?
}

/// Fetches a JSON document with GET.
///
/// # Errors
/// Fails as [`request`] does, if the status is not 200, or if the document is not a `T`.
pub async fn fetch<T: DeserializeOwned>(address: SocketAddr, path: &str) -> Result<T, ClientError> {
    let answer = request(DEADLINE, address, Method::GET, path, Bytes::new()).await?;
    if answer.status != StatusCode::OK {
        let text = answer.text().trim().chars().take(200).collect();
        return Err(ClientError::Status { address, path: path.to_owned(), status: answer.status, text });
    }
    serde_json::from_slice(&answer.body).map_err(|reason| ClientError::Content {
        address,
        path: path.to_owned(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_refused_connection_names_the_flag() {
        let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let error = fetch::<serde_json::Value>(address, "/status").await.unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "--admin-address={address}: Connection refused (os error 111); is it running, and with this --admin-address?"
            )
        );
    }

    #[tokio::test]
    async fn another_program_at_the_address_is_recognised() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            use tokio::io::AsyncWriteExt;
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH\r\n").await.unwrap();
        });
        let error = fetch::<serde_json::Value>(address, "/status").await.unwrap_err();
        assert!(matches!(error, ClientError::Http { .. }), "{error}");
    }
}
