//! Measurements by a server.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request};
use tonic::Status;
use tunnel_link::bench::{LONGEST, MODE_HEADER, Mode, serve};
use tunnel_link::grpc::{refuse, response};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Pipe, Traffic, pipe_of_client};

use super::state::SessionState;

fn mode(headers: &HeaderMap) -> Result<Mode, Status> {
    let text = headers.get(MODE_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
    String::from_utf8_lossy(text).parse().map_err(Status::invalid_argument)
}

/// Answers one stream like [`super::relay::relay`], with this agent as the target.
pub(super) async fn bench(
    session: Arc<SessionState>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let admitted = async {
        let mode = mode(request.headers())?;
        Ok::<_, Status>((mode, session.shared.bench.admit(Instant::now()).await?))
    };
    let (mode, permit) = match admitted.await {
        Ok(admitted) => admitted,
        Err(status) => {
            tracing::info!(server = %session.server, reason = status.message(), "measurement refused");
            return refuse(&mut respond, &status);
        }
    };
    let connection = session.connection();
    let Ok(mut send) = respond.send_response(response(), false) else { return };
    let (near, far) = pipe_of_client();
    let (status, traffic) = (near.status(), Traffic::default());
    let serving = tokio::spawn(serve(mode, near));
    let pipe = Pipe { flow: &session.path.flow, stalls: &session.common.stalls, traffic: &traffic };
    let over = async {
        match tokio::time::timeout(LONGEST, session.stop.cancelled()).await {
            Ok(()) => Outcome::Shutdown,
            Err(_) => Outcome::TimedOut,
        }
    };
    far.run(pipe, &mut send, request.into_body(), over).await;
    serving.abort();
    tracing::debug!(
        server = %session.server,
        mode = mode.as_str(),
        bytes = traffic.from_socket() + traffic.to_socket(),
        error = status.failure().map(|(_, reason)| reason),
        "measurement"
    );
    drop((connection, permit));
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn the_mode_is_read_from_the_header() {
        let headers = |value: &'static str| {
            HeaderMap::from_iter([(
                http::HeaderName::from_static(MODE_HEADER),
                HeaderValue::from_static(value),
            )])
        };
        assert_eq!(mode(&headers("sink")).unwrap(), Mode::Sink);
        assert_eq!(mode(&headers("all")).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(mode(&HeaderMap::new()).unwrap_err().code(), Code::InvalidArgument);
    }
}
