//! Removes secrets from text: keys, tokens and passwords. A bundle should not have any; this is a second line of
//! defence.

const HIDDEN: &str = "***";
/// Keys whose values are secrets, in flags, environment, headers, JSON and YAML.
const KEYS: [&str; 9] = [
    "token",
    "password",
    "passwd",
    "secret",
    "authorization",
    "client-key-data",
    "private-key",
    "privatekey",
    "cookie",
];
/// Lengths of an enrolment token's parts: an id, a dot, a secret.
const ID: usize = 6;
const SECRET: usize = 26;
/// Prefix of a JSON web token, as service accounts have: three parts of base64url.
const JWT: &str = "eyJ";

/// Returns the text without anything that looks like a secret or stands in a secret's place.
pub fn redacted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_key = false;
    for line in text.split_inclusive('\n') {
        let begins = line.contains("-----BEGIN") && line.contains("PRIVATE KEY");
        let ends = line.contains("-----END") && line.contains("PRIVATE KEY");
        if begins && !in_key {
            out += "*** a private key was here ***\n";
        }
        if begins || in_key {
            // A key on one line, as in JSON, begins and ends here.
            in_key = !ends;
            continue;
        }
        if ends {
            // A log whose beginning was cut off within the key.
            while let Some(start) = last_line(&out).filter(|start| is_base64(out[*start..].trim())) {
                out.truncate(start);
            }
            out += "*** a private key was here ***\n";
            continue;
        }
        out += &line_without_secrets(line);
    }
    out
}

/// Start of the last line.
fn last_line(text: &str) -> Option<usize> {
    let line = text.strip_suffix('\n').unwrap_or(text);
    (!line.is_empty()).then(|| line.rfind('\n').map_or(0, |end| end + 1))
}

fn is_base64(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte))
}

fn line_without_secrets(line: &str) -> String {
    let line = without_passwords(line);
    let line = without_values(&line);
    let mut out = String::with_capacity(line.len());
    let mut rest = line.as_str();
    while let Some(start) = rest.find(is_word) {
        out += &rest[..start];
        let word = &rest[start..];
        let end = word.find(|letter| !is_word(letter)).unwrap_or(word.len());
        out += if is_secret(&word[..end]) { HIDDEN } else { &word[..end] };
        rest = &word[end..];
    }
    out + rest
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_')
}

fn is_secret(word: &str) -> bool {
    let lower = |text: &str| text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let enrolment = word
        .split('.')
        .collect::<Vec<_>>()
        .windows(2)
        .any(|pair| pair[0].len() == ID && pair[1].len() == SECRET && lower(pair[0]) && lower(pair[1]));
    enrolment || word.starts_with(JWT) && word.matches('.').count() == 2
}

/// Removes user and password from `http://USER:PASSWORD@HOST`.
fn without_passwords(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out += before;
        let end = after
            .find(|letter: char| letter.is_whitespace() || "/\"'<>".contains(letter))
            .unwrap_or(after.len());
        match after[..end].rfind('@') {
            Some(host) => {
                out += HIDDEN;
                rest = &after[host..];
            }
            None => rest = after,
        }
    }
    out + rest
}

/// Removes the values of secret keys from `key: value` and `key=value`.
fn without_values(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let mut hide = Vec::new();
    for key in KEYS {
        for (at, _) in lower.match_indices(key) {
            let after = &lower[at + key.len()..];
            let quote = after.len() - after.trim_start_matches(['"', '\'', '\\']).len();
            let named = after[quote..].trim_start_matches(' ');
            let Some(sign) = named.strip_prefix([':', '=']) else { continue };
            let value = sign.trim_start_matches([' ', '"', '\'', '\\']);
            let from = lower.len() - value.len();
            // The value of a header may contain blanks: "Bearer …".
            let words = if key == "authorization" || key == "cookie" { "\r\n\"'" } else { " \t\r\n\"',}\\" };
            let end = value.find(|letter: char| words.contains(letter)).unwrap_or(value.len());
            if end > 0 {
                hide.push((from, from + end));
            }
        }
    }
    hide.sort_unstable();
    let (mut out, mut done) = (String::with_capacity(line.len()), 0);
    for (from, to) in hide {
        if from < done {
            continue;
        }
        out += &line[done..from];
        out += HIDDEN;
        done = to;
    }
    out + &line[done..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        let token = format!("abc123.{}", "x".repeat(SECRET));
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
