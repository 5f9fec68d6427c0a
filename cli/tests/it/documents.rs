//! The commands in the documents are ones that the program takes.

use std::path::Path;

use clap::CommandFactory;

/// A command of a document that the program refuses stops its reader.
#[test]
fn the_commands_in_the_documents_have_options_that_exist() {
    let mut command = switchyard_cli::Cli::command();
    command.build();
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut num_commands = 0;
    for path in ["README.md", "deploy/README.md"]
        .map(|name| root.join(name))
        .into_iter()
        .chain(documents(&root.join("docs")))
    {
        let text = std::fs::read_to_string(&path).expect("a document");
        for line in shell_lines(&text) {
            // Substitutions and lists begin commands of their own.
            for part in line.split(['|', ';', '&', '(', ')', '`']) {
                let words: Vec<&str> = part.split_whitespace().collect();
                // Behind an option the word is its value.
                let is_command = |at: usize| at == 0 || !words[at - 1].starts_with('-');
                let found = words
                    .iter()
                    .enumerate()
                    .find(|(at, word)| **word == "switchyard" && is_command(*at));
                let Some((at, _)) = found else {
                    continue;
                };
                num_commands += 1;
                if let Some(unknown) = unknown_option(&command, &words[at + 1..]) {
                    panic!("{}: {unknown} is no option: {line}", path.display());
                }
            }
        }
    }
    assert!(num_commands > 50, "found {num_commands} commands");
}

/// All Markdown files of a folder and its folders.
fn documents(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(documents(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// Lines of the blocks of shell commands. A line that ends with a backslash goes on with the next one.
fn shell_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let (mut is_shell, mut begun) = (false, String::new());
    for line in text.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            is_shell = language == "sh";
        } else if is_shell {
            // A comment is no command.
            let line = line.split(" # ").next().unwrap_or_default();
            match line.strip_suffix('\\') {
                Some(part) => begun.push_str(part),
                None => lines.push(std::mem::take(&mut begun) + line),
            }
        }
    }
    lines
}

/// The first word that looks like an option, and that neither the command of `words` nor one above it has.
fn unknown_option(command: &clap::Command, words: &[&str]) -> Option<String> {
    let mut chain = vec![command];
    for word in words {
        if let Some(subcommand) = chain.last().and_then(|last| last.find_subcommand(word)) {
            chain.push(subcommand);
        }
        if *word == "--" || word.starts_with('>') {
            return None;
        }
        let Some(long) = word.strip_prefix("--") else { continue };
        let long = long.split('=').next().unwrap_or_default();
        let is_long = |arg: &clap::Arg| arg.get_long() == Some(long);
        if !chain.iter().any(|command| command.get_arguments().any(is_long)) {
            // Options of features that this build does not have.
            if !crate::reference::FEATURE_OPTIONS.iter().any(|(prefix, _)| long.starts_with(prefix))
            {
                return Some((*word).to_owned());
            }
        }
    }
    None
}
