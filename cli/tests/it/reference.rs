//! `docs/reference/cli.md` and `docs/reference/metrics.md` agree with the code.
//!
//! With `SWITCHYARD_BLESS=1` the tests write the files instead of comparing them.

use std::fmt::Write as _;
use std::path::Path;

use clap::CommandFactory;

use crate::observability::{Family, live_metrics};

#[test]
fn the_reference_of_the_command_line_is_current() {
    let mut text = format!(
        "# Command line\n\n{GENERATED}\n\nEvery option is also an environment variable; an \
         argument without dashes is none. An option on the command line overrides its variable. Exit codes: 0 for success, 1 for a \
         failure (one line on standard error that starts with `error:`), 2 for wrong usage.\n"
    );
    let mut command = switchyard_cli::Cli::command();
    command.build();
    text.push_str("\n## Options of every command\n\n");
    for arg in command.get_arguments().filter(|arg| is_documented(arg)) {
        text.push_str(&option(arg));
    }
    for subcommand in documented_subcommands(&command) {
        describe(&mut text, subcommand, "switchyard");
    }
    compare("cli.md", &text, |line| !MISSING_OPTIONS.iter().any(|name| line.starts_with(name)));
}

/// Every flag's variable takes `1`, not only `true`.
#[test]
fn variables_of_flags_take_1() {
    fn check(command: &clap::Command, num_flags: &mut usize) {
        for arg in command.get_arguments() {
            if arg.get_env().is_some() && matches!(arg.get_action(), clap::ArgAction::SetTrue) {
                *num_flags += 1;
                let parser = format!("{:?}", arg.get_value_parser());
                let name = arg.get_id();
                assert!(
                    !parser.ends_with("::bool"),
                    "--{name}: give it FalseyValueParser ({parser})"
                );
            }
        }
        command.get_subcommands().for_each(|command| check(command, num_flags));
    }
    let (mut command, mut num_flags) = (switchyard_cli::Cli::command(), 0);
    command.build();
    check(&command, &mut num_flags);
    assert!(num_flags > 3, "only {num_flags} flags");
}

#[test]
fn the_reference_of_the_metrics_is_current() {
    let mut text = format!(
        "# Metrics\n\n{GENERATED}\n\nExpert servers and the control plane serve their metrics at \
         `/metrics` in Prometheus' text format, or in OpenMetrics if the scraper prefers it. A client \
         registers its metrics in the registry that its caller gives it. On Linux the control plane \
         also exports the `process_*` metrics of the Prometheus client library.\n"
    );
    for (component, families) in live_metrics() {
        let _ = write!(
            text,
            "\n## {component}\n\n| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n"
        );
        for (name, family) in families.iter().filter(|(name, _)| name.starts_with("switchyard_")) {
            let Family { kind, help, labels } = family;
            assert!(!help.is_empty() && !kind.is_empty(), "{name}: no help text or no type");
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            let (labels, unit) = (labels.join(", "), unit(name));
            let _ = writeln!(text, "| `{name}` | {kind} | {labels} | {unit} | {help} |");
        }
    }
    compare("metrics.md", &text, |_| true);
}

/// Appends a command, its options, and its subcommands.
fn describe(text: &mut String, command: &clap::Command, parent: &str) {
    let name = format!("{parent} {}", command.get_name());
    let about = command.get_long_about().or(command.get_about());
    let about = about.map(ToString::to_string).unwrap_or_default();
    let _ = write!(text, "\n## `{name}`\n\n{}\n", sentence(&about));
    let own = |arg: &&clap::Arg| is_documented(arg) && !arg.is_global_set();
    let (positional, options): (Vec<_>, Vec<_>) =
        command.get_arguments().filter(own).partition(|arg| arg.is_positional());
    let lines: Vec<String> = positional.into_iter().chain(options).map(option).collect();
    if !lines.is_empty() {
        let _ = write!(text, "\n{}", lines.concat());
    }
    for subcommand in documented_subcommands(command) {
        describe(text, subcommand, &name);
    }
}

fn documented_subcommands(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    let is_documented = |sub: &&clap::Command| !sub.is_hide_set() && sub.get_name() != "help";
    command.get_subcommands().filter(is_documented)
}

fn is_documented(arg: &clap::Arg) -> bool {
    !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version")
}

/// One line of Markdown for an option.
fn option(arg: &clap::Arg) -> String {
    let long = arg.get_long().unwrap_or_default();
    let values = match arg.get_value_names() {
        Some(names) if arg.get_action().takes_values() => {
            let names: Vec<&str> = names.iter().map(clap::builder::Str::as_str).collect();
            format!(" {}", names.join(" "))
        }
        _ => String::new(),
    };
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let name = if arg.is_positional() {
        values.trim_start().to_owned()
    } else {
        format!("--{long}{values}")
    };
    let mut line = format!("- `{name}`: {}", sentence(&help));
    let possible: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|_| arg.get_action().takes_values())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !possible.is_empty() {
        let _ = write!(line, " Values: {}.", possible.join(", "));
    }
    let defaults: Vec<&str> =
        arg.get_default_values().iter().filter_map(|value| value.to_str()).collect();
    if arg.get_action().takes_values() && !defaults.is_empty() {
        let _ = write!(line, " Default: `{}`.", defaults.join(","));
    }
    if arg.is_required_set() {
        line.push_str(" Required.");
    }
    if let Some(env) = arg.get_env().and_then(|env| env.to_str()) {
        let _ = write!(line, " Variable: `{env}`.");
    }
    for (prefix, feature) in FEATURE_OPTIONS {
        if long.starts_with(prefix) {
            let _ = write!(line, " Only in builds with the feature `{feature}`.");
        }
    }
    line.push('\n');
    line
}

/// The text in one line, with a full stop. Clap removes the last one of a help text.
fn sentence(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('<', "\\<");
    if text.is_empty() || text.ends_with('.') { text } else { format!("{text}.") }
}

/// Unit of a metric, which its name says.
fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    match name.rsplit_once('_') {
        Some((_, "seconds")) => "seconds",
        Some((_, "bytes")) => "bytes",
        _ => "count",
    }
}

/// Compares the lines of a file that `expected` accepts with `text`, or writes the file.
fn compare(file: &str, text: &str, expected: impl Fn(&str) -> bool) {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference")).join(file);
    if std::env::var_os("SWITCHYARD_BLESS").is_some_and(|value| value == "1") {
        assert!(MISSING_OPTIONS.is_empty(), "build with `--features verbs` to write {file}");
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("docs/reference");
        std::fs::write(&path, text).expect("write the reference");
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let lines: Vec<&str> = found.lines().filter(|line| expected(line)).collect();
    for (line, expected) in lines.iter().zip(text.lines()) {
        assert_eq!(*line, expected, "docs/reference/{file} is out of date: {HOW_TO_WRITE}");
    }
    assert_eq!(
        lines.len(),
        text.lines().count(),
        "docs/reference/{file} is out of date: {HOW_TO_WRITE}"
    );
}

const GENERATED: &str = "<!-- Generated from the code. \
    SWITCHYARD_BLESS=1 cargo nextest run -p switchyard-cli --features verbs reference:: writes it. -->";
const HOW_TO_WRITE: &str =
    "run SWITCHYARD_BLESS=1 cargo nextest run -p switchyard-cli --features verbs reference::";
/// Options by the feature that they need: the beginnings of their names.
pub const FEATURE_OPTIONS: [(&str, &str); 2] = [("verbs-config", "verbs"), ("ibgda-", "ibgda")];
/// Lines of the reference that describe options which this build does not have.
const MISSING_OPTIONS: &[&str] = match (cfg!(feature = "verbs"), cfg!(feature = "ibgda")) {
    (true, true) => &[],
    (true, false) => &["- `--ibgda-"],
    (false, true) => &["- `--verbs-config"],
    (false, false) => &["- `--verbs-config", "- `--ibgda-"],
};
