//! The page that shows the fleet in a browser. Its files are in the binary. They hold no data of the fleet, so they
//! need no token: the page's own requests carry it.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};

use super::App;

/// One file of the page.
#[derive(Clone, Copy, Debug)]
struct File {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

const FILES: [File; 11] = [
    File { path: "/", content_type: HTML, text: include_str!("../page/index.html") },
    File { path: "/ui/style.css", content_type: CSS, text: include_str!("../page/style.css") },
    File { path: "/ui/main.js", content_type: JS, text: include_str!("../page/main.js") },
    File { path: "/ui/api.js", content_type: JS, text: include_str!("../page/api.js") },
    File { path: "/ui/model.js", content_type: JS, text: include_str!("../page/model.js") },
    File { path: "/ui/heat.js", content_type: JS, text: include_str!("../page/heat.js") },
    File { path: "/ui/members.js", content_type: JS, text: include_str!("../page/members.js") },
    File { path: "/ui/goals.js", content_type: JS, text: include_str!("../page/goals.js") },
    File { path: "/ui/charts.js", content_type: JS, text: include_str!("../page/charts.js") },
    File { path: "/ui/uplot.js", content_type: JS, text: include_str!("../page/vendor/uplot.js") },
    File {
        path: "/ui/uplot.css",
        content_type: CSS,
        text: include_str!("../page/vendor/uplot.css"),
    },
];

/// Forbids everything but the page's own files and requests: no inline code, no other host, no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Routes of the page. They are not part of the API, so the OpenAPI document leaves them out.
pub(super) fn routes() -> impl Iterator<Item = (&'static str, MethodRouter<App>)> {
    FILES.into_iter().map(|file| (file.path, get(move || async move { file.into_response() })))
}

/// Returns true if `path` is a file of the page.
pub(super) fn is_page(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

impl IntoResponse for File {
    fn into_response(self) -> Response {
        let headers = [
            (CONTENT_TYPE, self.content_type),
            // A new control plane may have another page.
            (CACHE_CONTROL, "no-cache"),
            (CONTENT_SECURITY_POLICY, POLICY),
            (X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (REFERRER_POLICY, "no-referrer"),
        ];
        (headers, self.text).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that the page names and that is not served would leave it blank.
    #[test]
    fn every_file_that_the_page_names_is_served_and_nothing_comes_from_elsewhere() {
        for file in FILES.iter().filter(|file| !file.path.starts_with("/ui/uplot")) {
            for part in file.text.split(['"', '\'', '`']) {
                if let Some(name) = part.strip_prefix("./") {
                    assert!(is_page(&format!("/ui/{name}")), "{} imports {part}", file.path);
                }
                if part.starts_with("/ui/") {
                    assert!(is_page(part), "{} names {part}", file.path);
                }
                assert!(!part.starts_with("http"), "{} reaches out to {part}", file.path);
            }
            for forbidden in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("]
            {
                assert!(
                    !file.text.contains(forbidden),
                    "{}: {forbidden} could run text of peers",
                    file.path
                );
            }
        }
    }

    /// The browser test's stand-in for a control plane must send the same policy.
    #[test]
    fn the_browser_test_uses_this_policy() {
        let mock = include_str!("../../../tests/page/mock.py");
        for directive in POLICY.split("; ") {
            assert!(mock.contains(directive), "{directive}");
        }
    }
}
