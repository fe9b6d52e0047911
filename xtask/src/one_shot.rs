//! Logs that a scenario reads once although their program runs.
//!
//! A line appears a moment after its event: a scenario has to wait for it, in a closure that is called again and again, or to
//! read the log once the program has settled. Metrics are left out: a value that is read to be compared with a later one looks
//! like one that is read too early.
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Block, ImplItem, Item};

use crate::files::{files_below, text};

/// Fails with every such read below this folder.
pub(crate) fn check(folder: &Path) -> Result<()> {
    let mut found = Vec::new();
    for file in files_below(folder)? {
        if file.extension().is_some_and(|extension| extension == "rs") {
            let text = text(&file)?;
            let parsed = syn::parse_file(&text).with_context(|| format!("parsing {}", file.display()))?;
            found.extend(of_items(&parsed.items).map(|name| format!("{}: {name}", file.display())));
        }
    }
    ensure!(
        found.is_empty(),
        "these functions read a running program's log once: wait for the line, or use settled_log or settled_access_log\n{}",
        found.join("\n")
    );
    Ok(())
}

/// Names of functions with such reads. Others than async ones cannot wait: they are parts of conditions.
fn of_items(items: &[Item]) -> impl Iterator<Item = String> {
    let functions = items.iter().flat_map(|item| match item {
        Item::Fn(function) => vec![(&function.sig, &*function.block)],
        Item::Impl(block) => block.items.iter().filter_map(method).collect(),
        _ => Vec::new(),
    });
    let hasty = functions
        .filter(|(signature, block)| signature.asyncness.is_some() && reads_once(block.to_token_stream()));
    hasty.map(|(signature, _)| signature.ident.to_string())
}

fn method(item: &ImplItem) -> Option<(&syn::Signature, &Block)> {
    match item {
        ImplItem::Fn(method) => Some((&method.sig, &method.block)),
        _ => None,
    }
}

/// Reports whether a log is read outside of closures. To count the lines so far is allowed.
fn reads_once(tokens: TokenStream) -> bool {
    const LOGS: [&str; 2] = [".access_log()?", ".process.output()?"];
    let mut level = String::new();
    let (mut in_closure, mut in_parameters) = (false, false);
    let mut before: Option<TokenTree> = None;
    for token in tokens {
        let is = |mark: char| matches!(&token, TokenTree::Punct(punct) if punct.as_char() == mark);
        if is('|') && in_parameters {
            in_parameters = false;
        } else if is('|') && begins_expression(before.as_ref()) {
            (in_closure, in_parameters) = (true, true);
        } else if is(';') || is(',') && !in_parameters {
            in_closure = false;
        }
        if !in_closure {
            match &token {
                TokenTree::Group(group) if !group.stream().is_empty() => {
                    if reads_once(group.stream()) {
                        return true;
                    }
                    level.push_str("(…)");
                }
                other => level.push_str(&other.to_string()),
            }
        }
        before = Some(token);
    }
    LOGS.iter().any(|log| level.split(log).skip(1).any(|rest| !rest.starts_with(".len()")))
}

/// Reports whether an expression begins after this token, so that `|` is not an operator.
fn begins_expression(before: Option<&TokenTree>) -> bool {
    match before {
        None => true,
        Some(TokenTree::Punct(punct)) => ",=(&;>".contains(punct.as_char()),
        Some(TokenTree::Ident(name)) => ["async", "move", "return"].iter().any(|word| name == word),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_read_in_a_condition_or_once_it_is_complete() {
        let found = |text: &str| of_items(&syn::parse_file(text).unwrap().items).collect::<Vec<_>>();
        for hasty in [
            "let lines = server.access_log()?;",
            "if a | b || c { ensure!(!pair.first.process.output()?.contains(\"x\")); }",
            "wait(async || Ok(1)).await?; let log = agent.process.output()?;",
            "alongside(async { for line in server.access_log()? {} }).await?;",
            "let lines = server.access_log()?.split_off(before);",
        ] {
            assert_eq!(found(&format!("async fn hasty() {{ {hasty} }}")), ["hasty"], "{hasty}");
            assert_eq!(found(&format!("impl A {{ async fn hasty(&self) {{ {hasty} }} }}")), ["hasty"]);
            assert!(found(&format!("fn part() {{ {hasty} }}")).is_empty());
        }
        for right in [
            "let before = server.access_log()?.len();",
            "let lines = async || Ok(server.access_log()?.split_off(before)); wait(lines).await?;",
            "wait(\"it\", async || { let log = server.process.output()?; log }).await?;",
            "wait(\"it\", || server.process.output(), |log| log.contains(\"x\")).await?;",
            "let log = server.settled_log().await?;",
            "let said = process.output()?;",
        ] {
            assert!(found(&format!("async fn right() {{ {right} }}")).is_empty(), "{right}");
        }
    }
}
