//! The head of a request to the http door: what it names, and the head that the target gets.

use bytes::Bytes;
use tunnel_core::text::printable;

/// The most bytes of a request's head.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 128;
const SCHEME: &str = "http://";
/// Header that names the node instead of Host.
const PROXY_HOST: &str = "x-tunnel-proxy-host";
/// Header with the target, instead of the node's own address and Host's port.
pub(super) const PROXY_DEST: &str = "x-tunnel-proxy-dest";

/// A request's head, as far as the door needs it.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the head, including the empty line.
    pub length: usize,
    pub host: Option<String>,
    pub proxy_host: Option<String>,
    pub proxy_dest: Option<String>,
    /// The head that is sent to the target.
    pub rewritten: Bytes,
}

impl Head {
    /// What is sent to the target of the bytes that were `read`.
    pub(super) fn prefix(&self, read: &[u8]) -> Bytes {
        [&self.rewritten, &read[self.length..]].concat().into()
    }
}

/// Parses a head that arrives in pieces: at its end, and before that, to refuse early what is not a request, each time that
/// twice as much has come. So the work grows with the head's length, however small the pieces are.
#[derive(Debug, Default)]
pub struct HeadReader {
    /// Bytes that were searched for the end.
    searched: usize,
    /// Empty lines in front of the request, which are ignored (RFC 9112 section 2.2).
    start: usize,
    /// How many bytes are parsed next, if no end comes before.
    next: usize,
}

impl HeadReader {
    /// [`parse`] of all that was `read` so far, if that can tell more than the last time.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn parse(&mut self, read: &[u8]) -> Result<Option<Head>, String> {
        if self.is_worth_parsing(read) { parse(read) } else { Ok(None) }
    }

    fn is_worth_parsing(&mut self, read: &[u8]) -> bool {
        let worth = self.finds_end(read) || read.len() >= self.next.min(MAX_HEAD);
        if worth {
            self.next = 2 * read.len();
        }
        worth
    }

    /// Whether an empty line is in what has come since the last time.
    fn finds_end(&mut self, read: &[u8]) -> bool {
        if self.start == self.searched {
            self.start += read[self.start..].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        }
        // An end may have begun before.
        let new = &read[self.searched.saturating_sub(2).max(self.start)..];
        self.searched = read.len();
        new.windows(2).any(|bytes| bytes == b"\n\n") || new.windows(3).any(|bytes| bytes == b"\n\r\n")
    }
}

/// None: the head is not whole yet.
///
/// # Errors
/// Not a request, too large, or one whose end its recipients could see in different places.
pub fn parse(read: &[u8]) -> Result<Option<Head>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(read) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => length,
        Ok(httparse::Status::Partial) if read.len() < MAX_HEAD => return Ok(None),
        Ok(_) => return Err(format!("the head of the request is larger than {MAX_HEAD} bytes")),
        Err(error) => return Err(format!("not an HTTP/1.1 request: {error}")),
    };
    // A complete request has all three of them.
    let (Some(method), Some(path), Some(version)) = (request.method, request.path, request.version) else {
        return Err("not an HTTP/1.1 request".to_owned());
    };
    framing(request.headers, version)?;
    // A proxy's client names the target in the request line, which then replaces Host (RFC 9112 §3.2.2).
    let absolute = path.get(..SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME));
    let (authority, path) = if absolute {
        let rest = &path[SCHEME.len()..];
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let slash = if rest[end..].starts_with('/') { "" } else { "/" };
        (Some(rest[..end].to_owned()), format!("{slash}{}", &rest[end..]))
    } else {
        (None, path.to_owned())
    };
    // Clients offer h2c by default, and servers seldom accept: their HTTP/1.1 answer would leave the connection open.
    let upgrade = request.headers.iter().any(|header| {
        header.name.eq_ignore_ascii_case("upgrade") && !header.value.eq_ignore_ascii_case(b"h2c")
    });
    let mut head = Head { length, host: None, proxy_host: None, proxy_dest: None, rewritten: Bytes::new() };
    let mut rewritten = format!("{method} {path} HTTP/1.{version}\r\n").into_bytes();
    if let Some(authority) = &authority {
        rewritten.extend_from_slice(format!("Host: {authority}\r\n").as_bytes());
    }
    for header in request.headers.iter() {
        let name = header.name.to_ascii_lowercase();
        let taken = match name.as_str() {
            "host" => Some(&mut head.host),
            PROXY_HOST => Some(&mut head.proxy_host),
            PROXY_DEST => Some(&mut head.proxy_dest),
            _ => None,
        };
        if let Some(taken) = taken {
            let value =
                std::str::from_utf8(header.value).map_err(|_| format!("the header {name} is not text"))?;
            if taken.replace(value.trim().to_owned()).is_some() {
                return Err(format!("duplicate header {name}"));
            }
        }
        let hop = matches!(
            name.as_str(),
            "connection" | "keep-alive" | "proxy-connection" | "upgrade" | "http2-settings"
        );
        let named = name == "host" && authority.is_some();
        if name.starts_with("x-tunnel-proxy-") || named || hop && !upgrade {
            continue;
        }
        rewritten.extend_from_slice(header.name.as_bytes());
        rewritten.extend_from_slice(b": ");
        rewritten.extend_from_slice(header.value);
        rewritten.extend_from_slice(b"\r\n");
    }
    if !upgrade {
        rewritten.extend_from_slice(b"Connection: close\r\n");
    }
    rewritten.extend_from_slice(b"\r\n");
    head.host = authority.or(head.host);
    head.rewritten = rewritten.into();
    Ok(Some(head))
}

/// Checks that every recipient agrees where the request ends (RFC 9112 section 6): the target may read it otherwise than a
/// proxy in front of this door.
fn framing(headers: &[httparse::Header<'_>], version: u8) -> Result<(), String> {
    let values = |wanted: &str| {
        let mut values = headers.iter().filter(|header| header.name.eq_ignore_ascii_case(wanted));
        match (values.next(), values.next()) {
            (first, None) => Ok(first.map(|header| header.value)),
            _ => Err(format!("more than one {wanted}")),
        }
    };
    let length = values("Content-Length")?;
    let coding = values("Transfer-Encoding")?;
    if let Some(length) = length {
        let digits = !length.is_empty() && length.iter().all(u8::is_ascii_digit);
        if !digits || std::str::from_utf8(length).map_or(true, |length| length.parse::<u64>().is_err()) {
            return Err(format!("Content-Length {:?} is not a number", shown(length)));
        }
    }
    match coding {
        Some(_) if length.is_some() => Err("both Transfer-Encoding and Content-Length".to_owned()),
        Some(_) if version == 0 => Err("Transfer-Encoding in a request of HTTP/1.0".to_owned()),
        // Others are allowed before it, and no client uses them.
        Some(coding) if !coding.eq_ignore_ascii_case(b"chunked") => {
            Err(format!("Transfer-Encoding {:?} is not chunked", shown(coding)))
        }
        _ => Ok(()),
    }
}

fn shown(value: &[u8]) -> String {
    printable(&String::from_utf8_lossy(value), 100)
}

/// Host and port. Not by `http::uri::Authority`, which drops user information and takes an unusable port for none.
pub(super) fn split(authority: &str) -> Result<(&str, Option<u16>), String> {
    let wrong = || format!("{:?} is not a host and a port", printable(authority, 100));
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(wrong)?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or_else(wrong)?) })
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = port.map(|port| number(port).ok_or_else(wrong)).transpose()?;
    if host.is_empty() { Err(wrong()) } else { Ok((host, port)) }
}

/// A port. `u16::from_str` takes a sign too.
fn number(port: &str) -> Option<u16> {
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    port.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(text: &str) -> Head {
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn a_request_is_carried_alone() {
        let text = "GET /metrics?x=1 HTTP/1.1\r\nHost: edge-1:10255\r\nConnection: keep-alive\r\nKeep-Alive: 5\r\nX-Tunnel-Proxy-Host: edge-1\r\nX-Other: a  b\r\n\r\nbody";
        let head = head(text);
        assert_eq!(
            head.prefix(text.as_bytes()),
            "GET /metrics?x=1 HTTP/1.1\r\nHost: edge-1:10255\r\nX-Other: a  b\r\nConnection: close\r\n\r\nbody"
        );
        assert_eq!(
            (head.host.as_deref(), head.proxy_host.as_deref()),
            (Some("edge-1:10255"), Some("edge-1"))
        );
    }

    #[test]
    fn upgrades_and_proxies_requests() {
        let upgrade =
            "GET /exec HTTP/1.1\r\nHost: edge-1:10255\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
        assert_eq!(head(upgrade).rewritten, upgrade);
        let proxied = head("GET http://edge-1:9100/metrics HTTP/1.1\r\nHost: other\r\n\r\n");
        assert_eq!(proxied.host.as_deref(), Some("edge-1:9100"));
        assert_eq!(
            proxied.rewritten,
            "GET /metrics HTTP/1.1\r\nHost: edge-1:9100\r\nConnection: close\r\n\r\n"
        );
        let bare = head("GET HTTP://edge-1:9100?a=b HTTP/1.1\r\n\r\n");
        assert!(bare.rewritten.starts_with(b"GET /?a=b HTTP/1.1\r\n"));
        let h2c = head(
            "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
        );
        assert_eq!(h2c.rewritten, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    }

    #[test]
    fn malformed_requests_are_refused() {
        assert_eq!(parse(b"GET / HTTP/1.1\r\nHost: a").unwrap(), None);
        for wrong in [
            "\x16\x03\x01\x00",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: \u{ff}\r\n\r\n",
        ] {
            let bytes: Vec<u8> = wrong.chars().map(|c| c as u8).collect();
            assert!(parse(&bytes).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn authorities() {
        assert_eq!(split("edge-1:10255"), Ok(("edge-1", Some(10255))));
        assert_eq!(split("edge-1"), Ok(("edge-1", None)));
        assert_eq!(split("[fd00::1]:80"), Ok(("fd00::1", Some(80))));
        assert_eq!(split("[fd00::1]"), Ok(("fd00::1", None)));
        for wrong in
            ["", ":80", "a:", "a:0", "a:70000", "a:+80", "a:-1", "a: 80", "[fd00::1", "[fd00::1]80", "[]:80"]
        {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_limit_of_the_head_is_exact() {
        let request = |size: usize| {
            let (start, end) = ("GET / HTTP/1.1\r\nHost: a\r\nX: ", "\r\n\r\n");
            format!("{start}{}{end}", "x".repeat(size - start.len() - end.len()))
        };
        let whole = request(MAX_HEAD);
        assert_eq!(parse(whole.as_bytes()).unwrap().unwrap().length, MAX_HEAD);
        assert_eq!(parse(&whole.as_bytes()[..MAX_HEAD - 1]).unwrap(), None);
        for larger in [request(MAX_HEAD + 1), request(100_000)] {
            let error = "the head of the request is larger than 65536 bytes";
            assert_eq!(parse(larger.as_bytes()).unwrap_err(), error);
            assert_eq!(parse(&larger.as_bytes()[..MAX_HEAD]).unwrap_err(), error, "it is not waited for");
        }
    }

    #[test]
    fn a_head_in_single_bytes_is_parsed_a_few_times() {
        let (start, end) = ("GET / HTTP/1.1\r\nHost: a:1\r\nX: ", "\r\n\r\n");
        let line = "\r\n".repeat(1000);
        let fill = "x".repeat(MAX_HEAD - line.len() - start.len() - end.len());
        let whole = format!("{line}{start}{fill}{end}");
        let mut reader = HeadReader::default();
        let mut parsed = Vec::new();
        for length in 0..=whole.len() {
            let read = &whole.as_bytes()[..length];
            if reader.is_worth_parsing(read) {
                parsed.push(length);
                assert_eq!(parse(read).unwrap().is_some(), length == MAX_HEAD, "{length} bytes");
            }
        }
        // The powers of two, and the end, which is one.
        let doubled: Vec<_> = std::iter::once(0).chain((0..=16).map(|power| 1 << power)).collect();
        assert_eq!(parsed, doubled);
    }

    #[test]
    fn requests_whose_end_is_ambiguous_are_refused() {
        for (headers, reason) in [
            ("Content-Length: 3\r\nTransfer-Encoding: chunked", "both Transfer-Encoding and Content-Length"),
            ("Content-Length: 3\r\nContent-Length: 30", "more than one Content-Length"),
            ("content-length: 3\r\nCONTENT-LENGTH: 3", "more than one Content-Length"),
            ("Content-Length: 3, 3", "Content-Length \"3, 3\" is not a number"),
            ("Content-Length: +3", "Content-Length \"+3\" is not a number"),
            ("Content-Length: ", "Content-Length \"\" is not a number"),
            ("Content-Length: 18446744073709551616", "is not a number"),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", "more than one Transfer-Encoding"),
            ("Transfer-Encoding: chunked, identity", "\"chunked, identity\" is not chunked"),
            ("Transfer-Encoding: xchunked", "\"xchunked\" is not chunked"),
            ("Transfer-Encoding : chunked", "not an HTTP/1.1 request"),
            ("X: y\r\n Content-Length: 3", "not an HTTP/1.1 request"),
        ] {
            let request = format!("POST / HTTP/1.1\r\nHost: a:1\r\n{headers}\r\n\r\n");
            let error = parse(request.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{headers:?}: {error}");
        }
        let old = "POST / HTTP/1.0\r\nHost: a:1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(parse(old.as_bytes()).unwrap_err().contains("HTTP/1.0"));
    }

    /// What a server sees of a request: method, path, and the length of the body (`None`: chunked).
    type Seen = (String, String, Option<u64>);

    /// How hyper frames a request; `None` when it refuses it.
    async fn as_hyper_sees(request: &[u8]) -> Option<Seen> {
        use hyper::body::{Body as _, Incoming};
        let seen = std::sync::Mutex::new(None);
        let (mut client, server) = tokio::io::duplex(1 << 17);
        let service = hyper::service::service_fn(|request: hyper::Request<Incoming>| {
            let length = request.body().size_hint().exact();
            *seen.lock().unwrap() = Some((request.method().to_string(), request.uri().to_string(), length));
            async { Err::<hyper::Response<String>, _>(std::io::Error::other("seen")) }
        });
        use tokio::io::AsyncWriteExt as _;
        client.write_all(request).await.unwrap();
        client.shutdown().await.unwrap();
        let io = hyper_util::rt::TokioIo::new(server);
        let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
        seen.into_inner().unwrap()
    }

    proptest! {
        /// However it is cut, a head is taken or refused when its last byte has come, at the latest.
        #[test]
        fn pieces_give_the_same_head(
            lines in prop::collection::vec(prop::sample::select(vec![
                "\r\n", "\n", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\n", "Host: a:1\r\n", "Host: a:1\n", "X: y\r\n", "\r", "\0",
            ]), 0..9),
            cuts in prop::collection::vec(1usize..20, 0..20),
        ) {
            let whole = lines.concat().into_bytes();
            let mut reader = HeadReader::default();
            let (mut length, mut found) = (0, reader.parse(&[]));
            for cut in cuts.into_iter().chain([whole.len()]) {
                if !matches!(found, Ok(None)) {
                    break;
                }
                length = (length + cut).min(whole.len());
                found = reader.parse(&whole[..length]);
            }
            match parse(&whole) {
                // An error that is not followed by an end may be found later.
                Err(_) => prop_assert!(!matches!(found, Ok(Some(_)))),
                head => prop_assert_eq!(found, head),
            }
        }

        /// A request that is carried has one meaning: hyper frames it as it came and as it is sent alike.
        #[test]
        fn hyper_agrees_on_where_a_request_ends(
            method in prop::sample::select(vec!["GET", "POST", "PUT"]),
            version in 0u8..2,
            headers in prop::collection::vec(prop::sample::select(vec![
                "Content-Length: 3", "Content-Length: 3, 3", "Content-Length: 03", "content-length:5", "Content-Length: -1",
                "Content-Length: 0x3", "Transfer-Encoding: chunked", "transfer-encoding: CHUNKED",
                "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: identity",
                "Transfer-Encoding:\tchunked", "Transfer-Encoding: chunked ", "Connection: close", "Connection: content-length",
                "Upgrade: websocket\r\nConnection: Upgrade", "X-Tunnel-Proxy-Host: b", "X: y",
            ]), 0..4),
        ) {
            let request = format!("{method} /x HTTP/1.{version}\r\nHost: a:1\r\n{}\r\n", headers.iter().map(|h| format!("{h}\r\n")).collect::<String>());
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            if let Ok(head) = parse(request.as_bytes()) {
                let head = head.unwrap();
                let came = runtime.block_on(as_hyper_sees(request.as_bytes()));
                prop_assert!(came.is_some(), "hyper refuses what is carried");
                prop_assert_eq!(runtime.block_on(as_hyper_sees(&head.rewritten)), came);
            }
        }
    }
}
