//! Finds the server name in a TLS ClientHello (RFC 8446 §4.1.2, RFC 6066 §3) for TLS passthrough: it answers nothing,
//! and accepts an address as the name.

/// Maximum length of a ClientHello, in bytes on the wire.
pub const MAX_HELLO: usize = 16 << 10;
/// Maximum number of TLS records that it may be split into; clients send one.
const MAX_RECORDS: usize = 32;

const RECORD_HEADER: usize = 5;
const HANDSHAKE: u8 = 22;
/// Maximum length of a record's plaintext (RFC 8446 §5.1).
const MAX_RECORD: usize = 1 << 14;
const HANDSHAKE_HEADER: usize = 4;
const CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
const NAME_TYPE_HOST: u8 = 0;
/// Maximum length of a host name (RFC 1035 §3.1, in text).
const MAX_NAME: usize = 255;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The server name as the client sent it.
    pub name: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    #[error("not TLS")]
    NotTls,
    #[error("not a ClientHello")]
    NotHello,
    #[error("a ClientHello of more than {MAX_HELLO} bytes")]
    TooLong,
    #[error("a malformed ClientHello: {0}")]
    Malformed(&'static str),
}

impl HelloError {
    /// Returns the TLS alert to answer with (RFC 8446 §6).
    pub const fn alert(self) -> u8 {
        match self {
            Self::NotTls | Self::NotHello => 10,
            Self::TooLong => 22,
            Self::Malformed(_) => 50,
        }
    }
}

/// Parses the ClientHello at the beginning of `bytes`, which may be split into several records. Returns `None` if it is
/// not complete yet.
///
/// # Errors
/// The bytes are not the beginning of a ClientHello.
pub fn parse_client_hello(bytes: &[u8]) -> Result<Option<Hello>, HelloError> {
    let mut message = Vec::new();
    let mut rest = bytes;
    for _ in 0..MAX_RECORDS {
        // Decides from the first byte on, so that an HTTP client does not have to wait for a timeout.
        match rest {
            [] | [HANDSHAKE] => return Ok(None),
            [HANDSHAKE, 3, ..] => {}
            _ => return Err(HelloError::NotTls),
        }
        let [_, _, _, high, low, body @ ..] = rest else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if length == 0 || length > MAX_RECORD {
            return Err(HelloError::Malformed("record length"));
        }
        message.extend_from_slice(&body[..length.min(body.len())]);
        if let Some(whole) = whole_message(&message)? {
            return client_hello(whole).map(|name| Some(Hello { name }));
        }
        if bytes.len() >= MAX_HELLO {
            return Err(HelloError::TooLong);
        }
        if body.len() < length {
            return Ok(None);
        }
        rest = &rest[RECORD_HEADER + length..];
    }
    Err(HelloError::Malformed("too many records"))
}

/// Returns the body of the ClientHello; `None` if it is not complete yet.
fn whole_message(message: &[u8]) -> Result<Option<&[u8]>, HelloError> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(HelloError::NotHello);
    }
    let [_, a, b, c, body @ ..] = message else { return Ok(None) };
    let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if length + HANDSHAKE_HEADER > MAX_HELLO {
        return Err(HelloError::TooLong);
    }
    Ok(body.get(..length))
}

fn client_hello(body: &[u8]) -> Result<Option<String>, HelloError> {
    let mut body = Reader(body);
    body.take(2 + 32).ok_or(HelloError::Malformed("version and random"))?;
    body.vector8().ok_or(HelloError::Malformed("session id"))?;
    body.vector16().ok_or(HelloError::Malformed("cipher suites"))?;
    body.vector8().ok_or(HelloError::Malformed("compression methods"))?;
    if body.0.is_empty() {
        return Ok(None);
    }
    let mut extensions = Reader(body.vector16().ok_or(HelloError::Malformed("extensions"))?);
    while !extensions.0.is_empty() {
        let kind = extensions.u16().ok_or(HelloError::Malformed("extension type"))?;
        let data = extensions.vector16().ok_or(HelloError::Malformed("extension length"))?;
        if kind == EXTENSION_SERVER_NAME {
            return server_name(data);
        }
    }
    Ok(None)
}

fn server_name(data: &[u8]) -> Result<Option<String>, HelloError> {
    const BAD: HelloError = HelloError::Malformed("server_name");
    let mut names = Reader(Reader(data).vector16().ok_or(BAD)?);
    while !names.0.is_empty() {
        let kind = names.u8().ok_or(BAD)?;
        let name = names.vector16().ok_or(BAD)?;
        if kind == NAME_TYPE_HOST {
            if name.is_empty() || name.len() > MAX_NAME || !name.iter().all(u8::is_ascii_graphic) {
                return Err(BAD);
            }
            return Ok(Some(name.iter().copied().map(char::from).collect()));
        }
    }
    Ok(None)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn vector8(&mut self) -> Option<&'a [u8]> {
        let length = self.u8()?;
        self.take(usize::from(length))
    }

    fn vector16(&mut self) -> Option<&'a [u8]> {
        let length = self.u16()?;
        self.take(usize::from(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustls::pki_types::ServerName;
    use std::sync::Arc;

    /// Returns a ClientHello of rustls.
    fn hello(name: &str) -> Vec<u8> {
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// Splits the message into records of at most `size` bytes.
    fn in_records(hello: &[u8], size: usize) -> Vec<u8> {
        hello[RECORD_HEADER..]
            .chunks(size)
            .flat_map(|part| {
                let length = u16::try_from(part.len()).unwrap().to_be_bytes();
                [&[HANDSHAKE, 3, 1, length[0], length[1]][..], part].concat()
            })
            .collect()
    }

    proptest! {
        #[test]
        fn the_name_is_found_in_any_number_of_records_and_segments(name in "[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\\.[a-z]{1,8}){0,3}", size in 60usize..600) {
            let hello = hello(&name);
            // With a post-quantum key, as Go's clients send it too.
            prop_assert!(hello.len() > 1216, "{}", hello.len());
            let bytes = in_records(&hello, size);
            for end in 0..bytes.len() {
                prop_assert_eq!(parse_client_hello(&bytes[..end]), Ok(None), "{} of {}", end, bytes.len());
            }
            prop_assert_eq!(parse_client_hello(&bytes), Ok(Some(Hello { name: Some(name) })));
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse_client_hello(&bytes);
        }

        #[test]
        fn a_corrupted_hello_never_panics(at in any::<prop::sample::Index>(), value in any::<u8>()) {
            let mut bytes = hello("edge-1");
            let at = at.index(bytes.len());
            bytes[at] = value;
            let _ = parse_client_hello(&bytes);
        }
    }

    #[test]
    fn other_protocols_are_recognised_immediately() {
        assert_eq!(parse_client_hello(b"G"), Err(HelloError::NotTls));
        assert_eq!(parse_client_hello(b"GET / HTTP/1.1\r\n"), Err(HelloError::NotTls));
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 1, 2]), Err(HelloError::NotHello));
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 0]), Err(HelloError::Malformed("record length")));
        assert_eq!(parse_client_hello(&[22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff]), Err(HelloError::TooLong));
        assert_eq!(
            parse_client_hello(&hello("10.0.0.7")),
            Ok(Some(Hello { name: None })),
            "rustls does not send an address as SNI"
        );
    }

    /// This parser exists because rustls' own (`server::Acceptor`) ignores an address as server name.
    #[test]
    fn an_address_as_server_name_is_found() {
        let mut bytes = hello("aaaa.bbb");
        let at = bytes.windows(8).position(|window| window == b"aaaa.bbb").unwrap();
        bytes[at..at + 8].copy_from_slice(b"10.0.0.7");
        let found = Hello { name: Some("10.0.0.7".to_owned()) };
        assert_eq!(parse_client_hello(&bytes), Ok(Some(found)));
        let mut acceptor = rustls::server::Acceptor::default();
        acceptor.read_tls(&mut bytes.as_slice()).unwrap();
        let accepted = acceptor.accept().ok().flatten().unwrap();
        assert_eq!(accepted.client_hello().server_name(), None);
    }
}
