//! Removes secrets from text: keys, tokens and passwords. A bundle should not have any; this is a second line of
//! defence.

use std::sync::LazyLock;

use regex::Regex;

/// A pattern of secrets, and what stands in its place.
struct Pattern(Regex, &'static str);

/// In this order: a value may be any of the later ones.
static PATTERNS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let patterns = [
        // From its first to its last line, or to the end of a text that ends in it. A key on one line, as in JSON, begins
        // and ends there.
        (
            r"(?m)^[^\n]*-----BEGIN[^\n]*?PRIVATE KEY(?s:.*?-----END[^\n]*PRIVATE KEY[^\n]*(?:\n|\z)|.*)",
            "*** a private key was here ***\n",
        ),
        // A log whose beginning was cut off within the key. Its lines may end in CR LF.
        (
            r"(?m)(?:^[ \t]*[A-Za-z0-9+/=]*[ \t\r]*\n)*^[^\n]*-----END[^\n]*PRIVATE KEY[^\n]*(?:\n|\z)",
            "*** a private key was here ***\n",
        ),
        // User and password in http://USER:PASSWORD@HOST.
        (r#"://[^\s/"'<>]*@"#, "://***@"),
        // Values of headers, which may contain blanks: "Bearer …".
        (r#"(?i)((?:authorization|cookie)["'\\]* *[:=][ "'\\]*)[^\r\n"']+"#, "${1}***"),
        // Values in flags, environment, JSON and YAML.
        (
            r#"(?i)((?:token|password|passwd|secret|client-key-data|private-key|privatekey)["'\\]* *[:=][ "'\\]*)[^ \t\r\n"',}\\]+"#,
            "${1}***",
        ),
        // Enrolment tokens: an id, a dot, a secret; and JSON web tokens, as service accounts have.
        (r"[A-Za-z0-9._-]*\b[a-z0-9]{6}\.[a-z0-9]{26}\b[A-Za-z0-9._-]*", "***"),
        (r"\beyJ[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*", "***"),
    ];
    // Cannot fail: the patterns are constants, and the tests compile all of them.
    let pattern = |(pattern, instead)| Pattern(Regex::new(pattern).expect("it is a pattern"), instead);
    patterns.into_iter().map(pattern).collect()
});

/// Returns the text without anything that looks like a secret or stands in a secret's place.
pub fn redacted(text: &str) -> String {
    let hide =
        |text: String, Pattern(pattern, instead): &Pattern| pattern.replace_all(&text, *instead).into_owned();
    PATTERNS.iter().fold(text.to_owned(), hide)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        let token = format!("abc123.{}", "x".repeat(26));
        for (text, expected) in [
            ("up 3 hours, session 7\n", "up 3 hours, session 7\n"),
            ("--ca-hash=sha256:0011 --server=a:1\n", "--ca-hash=sha256:0011 --server=a:1\n"),
            (&*format!("enrolled with {token}, then\n"), "enrolled with ***, then\n"),
            (&format!("--token={token} --node=a\n"), "--token=*** --node=a\n"),
            ("password = s3cret\n", "password = ***\n"),
            ("\"token\" : \"s3cret\"\n", "\"token\" : \"***\"\n"),
            (
                "MIIEvQ+x/\nq3Fw==\n-----END PRIVATE KEY-----\nlast\n",
                "*** a private key was here ***\nlast\n",
            ),
            (
                "MIIEvQ+x/\r\nq3Fw==\r\n-----END PRIVATE KEY-----\r\nlast\r\n",
                "*** a private key was here ***\nlast\r\n",
            ),
            ("a line\nq3Fw==\n-----END PRIVATE KEY-----\n", "a line\n*** a private key was here ***\n"),
            ("proxy http://user:pa%40ss@proxy:3128/ answers\n", "proxy http://***@proxy:3128/ answers\n"),
            ("https://a.example/b@c stays\n", "https://a.example/b@c stays\n"),
            ("{\"password\": \"hunter2\", \"a\": 1}\n", "{\"password\": \"***\", \"a\": 1}\n"),
            ("Authorization: Bearer abc def\n", "Authorization: ***\n"),
            ("bearer eyJhbGciOi.eyJpc3Mi.c2ln-_x end\n", "bearer *** end\n"),
            ("redirect range 198.18.0.0/15\n", "redirect range 198.18.0.0/15\n"),
            ("token-range=198.18.0.0/15\n", "token-range=198.18.0.0/15\n"),
            ("token-file=/run/t\n", "token-file=/run/t\n"),
            (
                "a\n-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\nb\n",
                "a\n*** a private key was here ***\nb\n",
            ),
            (
                "x: \"-----BEGIN EC PRIVATE KEY-----\\nMIGH\\n-----END EC PRIVATE KEY-----\"\nb",
                "*** a private key was here ***\nb",
            ),
        ] {
            assert_eq!(redacted(text), expected);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_taken(text in "\\PC{0,200}", around in "[ -~\n]{0,40}") {
            let token = format!("q7w8e9.{}", "0a1b2c3d4e5f6g7h8i9j0k1l2m");
            let shown = redacted(&format!("{text}{around} {token}\n{around}"));
            prop_assert!(!shown.contains("0a1b2c3d4e5f6g7h8i9j0k1l2m"));
            redacted(&text);
        }
    }
}
