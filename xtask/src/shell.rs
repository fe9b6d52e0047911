//! Man pages and completion scripts of the programs.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::command::{output, program, run, target_dir};
use crate::files;
use crate::help::{self, Help};
use crate::image::VERSION;
use crate::packages;
use crate::source::git;

const PROGRAMS: &[&str] = &["tunnel-server", "tunnel-agent"];
const SHELLS: &[&str] = &["bash", "zsh", "fish"];
/// Beginnings of command lines, and what completes the last word: a command, a flag, a value, and for zsh a file where a flag's value
/// has a name with a colon.
const TRIES: &[(&str, &str)] = &[
    ("tunnel-server token cre", "create"),
    ("tunnel-server token create --server-addr", "--server-address"),
    ("tunnel-server status --output wi", "wide"),
    ("tunnel-agent comp", "completion"),
    ("tunnel-agent --allow-targ", "--allow-target"),
    ("tunnel-agent status --output ya", "yaml"),
];
const ZSH_TRIES: &[(&str, &str)] = &[
    ("tunnel-server token create --server-address=/et", "/etc/"),
    ("tunnel-agent --allow-target=/et", "/etc/"),
];

/// Writes the pages to <target dir>/man and the scripts to <target dir>/completion/PROGRAM.SHELL. Returns the target dir. The
/// programs are in that folder.
pub(crate) fn build(programs: &Path) -> Result<PathBuf> {
    let target = target_dir()?;
    let (man, completion) = (target.join("man"), target.join("completion"));
    for folder in [&man, &completion] {
        // Of another version.
        fs::remove_dir_all(folder).ok();
        files::create(folder)?;
    }
    let date = git(&["log", "-1", "--format=%cs"]).unwrap_or_default();
    for name in PROGRAMS {
        let path = programs.join(name);
        for shell in SHELLS {
            let script = output(program(&path).args(["completion", shell]))?;
            files::write(&completion.join(format!("{name}.{shell}")), script)?;
        }
        let all = help::of_program(&path, name)?;
        let of_program = all.first().map(|(_, help)| help.names()).unwrap_or_default();
        for (words, help) in &all {
            let known = if words.len() == 1 { BTreeSet::new() } else { of_program.clone() };
            let path = man.join(format!("{}.1", words.join("-")));
            files::write(&path, page(&date, words, help, &known))?;
        }
    }
    Ok(target)
}

/// Makes a man page (man(7)) of a command. The date is that of the commit.
fn page(date: &str, words: &[String], help: &Help, known: &BTreeSet<&str>) -> String {
    let name = words.join("-");
    let (summary, _) = help.about.split_once(['\n', ':']).unwrap_or((&help.about, ""));
    let (summary, _) = summary.split_once(". ").unwrap_or((summary, ""));
    let mut page =
        format!(".TH {} 1 \"{date}\" \"Postern {VERSION}\"\n.nh\n.ad l\n", roff(&name.to_uppercase()));
    page += &format!(".SH NAME\n{} \\- {}\n.SH SYNOPSIS\n.nf\n", roff(&name), roff(summary));
    page += &format!("{}\n.fi\n.SH DESCRIPTION\n", roff(&help.usage));
    page += &help.about.lines().map(roff).collect::<Vec<_>>().join("\n.PP\n");
    page += "\n";
    if help.takes_all(known) {
        page += &format!(".PP\nAlso takes the flags of\n.BR {} (1).\n", roff(&words[0]));
    }
    for (heading, flags) in help.listed(known) {
        page += &format!(".SH {}\n", roff(&heading.to_uppercase()));
        for flag in flags {
            page += &format!(".TP\n.B {}\n{}\n", roff(&flag.name), roff(&flag.text));
            if !flag.default.is_empty() {
                page += &format!(".br\nDefault: {}\n", roff(&flag.default));
            }
        }
    }
    let above = (words.len() > 1).then(|| words[..words.len() - 1].join("-"));
    let below = help.commands.iter().map(|command| format!("{name}-{command}"));
    let others: Vec<_> =
        above.into_iter().chain(below).map(|page| format!(".BR {} (1)", roff(&page))).collect();
    if !others.is_empty() {
        page += &format!(".SH SEE ALSO\n{}\n", others.join(",\n"));
    }
    page
}

/// Escapes text for roff.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // Else it would be a request.
    let lines = text
        .lines()
        .map(|line| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() });
    lines.collect::<Vec<_>>().join("\n")
}

/// Completes command lines with the scripts in real shells, and lints the pages.
pub(crate) fn check(target: &Path) -> Result<()> {
    packages::install(&[packages::SHELLS])?;
    let completion = target.join("completion");
    for (line, word) in TRIES {
        let script =
            |shell: &str| completion.join(format!("{}.{shell}", line.split(' ').next().unwrap_or_default()));
        for (shell, told) in
            [("bash", ["-c", BASH, "bash"].as_slice()), ("fish", &["--no-config", "-c", FISH])]
        {
            let words = output(program(shell).args(told).arg(script(shell)).arg(line))?;
            let is_there = words.split_whitespace().any(|found| found == *word);
            ensure!(is_there, "{shell} completes {line:?} with {words:?}, without {word:?}");
        }
    }
    for (line, word) in TRIES.iter().chain(ZSH_TRIES) {
        let script = completion.join(format!("{}.zsh", line.split(' ').next().unwrap_or_default()));
        let mut zsh = program("timeout");
        zsh.args(["20", "zsh", "-f", "-c", ZSH, "zsh"]).arg(script).args([line, word]).env("TERM", "dumb");
        output(&mut zsh).with_context(|| format!("zsh does not complete {line:?} with {word:?}"))?;
    }
    let pages = files::paths_in(&target.join("man"))?;
    run(program("mandoc").args(["-T", "lint", "-W", "warning"]).args(&pages))
}

/// Prints the words with which bash completes `$2` by the script `$1`.
const BASH: &str = r#"source "$1"; read -ra COMP_WORDS <<< "$2"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
read -ra rule <<< "$(complete -p "${COMP_WORDS[0]}")"
while [[ ${rule[0]} != -F ]]; do rule=("${rule[@]:1}"); done
"${rule[1]}" "${COMP_WORDS[0]}" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
echo "${COMPREPLY[*]}""#;
const FISH: &str = "source $argv[1]; complete --do-complete=$argv[2]";
/// Types `$2` and Tab into a zsh with the script `$1`, and waits for `$3`. zsh completes nothing without a terminal.
const ZSH: &str = r#"zmodload zsh/zpty; zpty shell zsh -f -i
zpty -w shell "autoload -Uz compinit; compinit -u -D; source ${(q)1}; print REA''DY"
zpty -r -m shell shown '*READY*'
zpty -w -n shell "$2"$'\t'
zpty -r -m shell shown "*$3*"
zpty -w shell $'\C-uexit'"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_request() {
        assert_eq!(roff(".a\n'b\nc --d \\"), "\\&.a\n\\&'b\nc \\-\\-d \\e");
    }

    #[test]
    fn a_page_names_its_neighbours() {
        let help = help::parse(
            "Show it. And more: less\n\nUsage: a b [OPTIONS]\n\nCommands:\n  c  C\n\nOptions:\n  -o, --output <F>  Form [default: text]\n",
        );
        let page = page("2026-01-02", &["a".to_owned(), "b".to_owned()], &help, &BTreeSet::new());
        for part in [
            ".SH NAME\na\\-b \\- Show it\n",
            ".TP\n.B \\-o, \\-\\-output <F>\nForm\n.br\nDefault: text\n",
            ".SH SEE ALSO\n.BR a (1),\n.BR a\\-b\\-c (1)\n",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
    }
}
