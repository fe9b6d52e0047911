//! The status page, which is part of the binary.

use tunnel_runtime::admin::Page;

/// The page's files, by path on the admin port.
pub(crate) const PAGES: &[Page] = &[
    Page { path: "/ui/", content_type: "text/html; charset=utf-8", body: include_str!("page/index.html") },
    Page {
        path: "/ui/page.js",
        content_type: "text/javascript; charset=utf-8",
        body: include_str!("page/page.js"),
    },
    Page {
        path: "/ui/report.js",
        content_type: "text/javascript; charset=utf-8",
        body: include_str!("page/report.js"),
    },
    Page {
        path: "/ui/page.css",
        content_type: "text/css; charset=utf-8",
        body: include_str!("page/page.css"),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The page shows data that comes from nodes and clients.
    #[test]
    fn nothing_is_written_as_markup_or_run_as_a_script() {
        let script = PAGES[1].body.to_owned() + PAGES[2].body;
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "setHTML",
            "srcdoc",
        ] {
            assert!(!script.contains(way), "{way}");
        }
    }

    /// The page's Content-Security-Policy forbids them.
    #[test]
    fn the_page_has_no_inline_script_or_style_and_nothing_of_elsewhere() {
        let page = PAGES[0].body;
        for forbidden in ["<style", "style=", "onclick", "onload", "javascript:", "http:", "https:", "//"] {
            assert!(!page.contains(forbidden), "{forbidden}");
        }
        assert_eq!(page.matches("<script").count(), 1);
        assert!(page.contains("<script src=\"page.js\" type=\"module\"></script>"));
    }
}
