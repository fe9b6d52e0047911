//! URLs of the book: a pod has no copy of it.

/// Where the book is published, in a folder for each version; docs/releases.md says how it is set.
const BOOK: &str = match option_env!("POSTERN_DOCS_URL") {
    Some(url) => url,
    None => "https://example.org/postern",
};

/// A page that findings name.
#[derive(Clone, Copy, Debug)]
pub enum Page {
    Troubleshooting,
    Nodes,
    Certificates,
}

impl Page {
    /// Path below docs/, and in the book.
    fn path(self) -> &'static str {
        match self {
            Self::Troubleshooting => "operate/troubleshooting",
            Self::Nodes => "tasks/nodes",
            Self::Certificates => "tasks/certificates",
        }
    }

    pub fn url(self) -> String {
        format!("{BOOK}/v{}/{}.html", env!("CARGO_PKG_VERSION"), self.path())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Returns a page's text.
    pub(crate) fn text(page: Page) -> String {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        fs::read_to_string(docs.join(page.path()).with_extension("md")).unwrap()
    }

    #[test]
    fn pages_exist() {
        for page in [Page::Troubleshooting, Page::Nodes, Page::Certificates] {
            assert!(text(page).starts_with("# "), "{page:?}");
        }
        let url = concat!("/v", env!("CARGO_PKG_VERSION"), "/tasks/nodes.html");
        assert!(Page::Nodes.url().ends_with(url), "{}", Page::Nodes.url());
    }
}
