//! Measurements by a server.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request};
use tonic::Status;
use tunnel_link::bench::{LONGEST, MODE_HEADER, Mode, pair, serve};
use tunnel_link::grpc::{refuse, response};
use tunnel_link::outcome::Outcome;
use tunnel_link::relay::{Abort, Traffic, prepare_socket};

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
    let (mut socket, served) = match pair().await {
        Ok(made) => made,
        Err(error) => return refuse(&mut respond, &Status::internal(error.to_string())),
    };
    prepare_socket(&socket);
    let connection = session.connection();
    let Ok(mut send) = respond.send_response(response(), false) else { return };
    let serving = tokio::spawn(serve(mode, served));
    let (abort, traffic) = (Arc::new(Abort::default()), Traffic::default());
    let relay = session.relay(&abort, &traffic);
    let over = async {
        match tokio::time::timeout(LONGEST, session.stop.cancelled()).await {
            Ok(()) => Outcome::Shutdown,
            Err(_) => Outcome::TimedOut,
        }
    };
    let ended = {
        let inbound = std::future::ready(Ok(request.into_body()));
        let mut run = std::pin::pin!(relay.run(&mut socket, Bytes::new(), &mut send, inbound));
        tokio::select! {
            ended = &mut run => ended,
            outcome = over => {
                abort.trigger(outcome);
                run.await
            }
        }
    };
    serving.abort();
    tracing::debug!(
        server = %session.server,
        mode = mode.as_str(),
        bytes = traffic.from_socket() + traffic.to_socket(),
        error = ended.err().map(tracing::field::display),
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
