//! Pages for browsers.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Allows only the program's own files and answers; no other page may frame this one.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
    form-action 'none'; frame-ancestors 'none'";

/// A file built into the program.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub path: &'static str,
    pub content_type: &'static str,
    pub body: &'static str,
}

impl Page {
    pub(super) fn answer(self) -> Response {
        let headers = [
            (header::CONTENT_TYPE, self.content_type),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            // An upgraded program has other files.
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, self.body).into_response()
    }
}

/// Redirects to another page. Relative, so that it also works behind `kubectl proxy`.
pub(super) fn lead_to(location: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, location)]).into_response()
}

/// Reports whether the client is a browser rather than curl or a script.
pub(super) fn is_browser(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.split(',').any(|kind| kind.trim().starts_with("text/html")))
}
