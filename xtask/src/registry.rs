//! A registry on loopback with what is in one OCI archive: as much of its protocol as a client needs to pull.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Media type and bytes by digest and by tag.
type Contents = BTreeMap<String, (String, Vec<u8>)>;

pub(crate) struct Registry {
    pub(crate) address: SocketAddr,
}

impl Registry {
    /// Answers until this process ends.
    pub(crate) fn serve(archive: &Path) -> Result<Self> {
        let contents = contents(archive)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a registry on loopback")?;
        let address = listener.local_addr().context("a registry on loopback")?;
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The client reports what it did not get.
                answer(&contents, &stream).ok();
            }
        });
        Ok(Self { address })
    }
}

fn contents(archive: &Path) -> Result<Contents> {
    let file = File::open(archive).with_context(|| format!("reading {}", archive.display()))?;
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(file).entries().context("an archive")? {
        let mut entry = entry.context("an archive")?;
        let name = entry.path().context("an archive")?.display().to_string();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).context("an archive")?;
        files.insert(name, bytes);
    }
    let index: Value = serde_json::from_slice(files.get("index.json").context("no index.json")?)?;
    let mut contents = Contents::new();
    for (name, bytes) in &files {
        if let Some(hash) = name.strip_prefix("blobs/sha256/") {
            contents.insert(format!("sha256:{hash}"), ("application/octet-stream".to_owned(), bytes.clone()));
        }
    }
    for manifest in index["manifests"].as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let digest = text(&manifest["digest"]);
        let (_, bytes) = contents.get(&digest).with_context(|| format!("no blob {digest}"))?;
        let found = (text(&manifest["mediaType"]), bytes.clone());
        contents.insert(text(&manifest["annotations"]["org.opencontainers.image.ref.name"]), found.clone());
        contents.insert(digest, found);
    }
    Ok(contents)
}

/// Answers one request, for `/v2/NAME/manifests/…` or `/v2/NAME/blobs/…`, and closes.
fn answer(contents: &Contents, stream: &TcpStream) -> Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().context("no request")??;
    for line in lines.by_ref() {
        if line?.is_empty() {
            break;
        }
    }
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let found = path.rsplit('/').next().and_then(|name| contents.get(name));
    let none = (String::new(), Vec::new());
    let (status, (media_type, bytes)) = found.map_or(("404 Not Found", &none), |found| ("200 OK", found));
    let mut stream = stream;
    let digest = crate::image::oci::digest(bytes);
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\nDocker-Content-Digest: {digest}\r\nConnection: close\r\n\r\n",
        bytes.len()
    )?;
    if method == "GET" {
        stream.write_all(bytes)?;
    }
    Ok(())
}
