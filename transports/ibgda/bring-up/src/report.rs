//! Output of a run: a line for each stage, as text or as JSON.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use serde::Serialize;

use crate::stage::Stage;

/// Why a run ended before its last stage.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) stage: Stage,
    /// Whether this host lacks something, in contrast to something that does not work.
    pub(crate) is_lacking: bool,
    pub(crate) error: anyhow::Error,
}

/// Exit statuses, as `--help` and docs/how-to/ibgda-bring-up.md list them. 2, wrong usage, is clap's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Passed = 0,
    Failed = 1,
    Lacking = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[derive(Serialize)]
struct StageLine<'a> {
    stage: &'static str,
    state: &'static str,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<&'static str>,
    guide: String,
}

#[derive(Serialize)]
struct ResultLine {
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<&'static str>,
    exit: u8,
}

/// Destination of lines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reporter {
    pub(crate) is_json: bool,
}

impl Reporter {
    pub(crate) fn listening(self, address: SocketAddr) {
        if self.is_json {
            self.json(&serde_json::json!({ "listening": address.to_string() }));
        } else {
            line(&format!("listening at {address}"));
        }
    }

    pub(crate) fn passed(self, stage: Stage, detail: &str) {
        self.stage(stage, "ok", detail, None);
    }

    pub(crate) fn left_out(self, stage: Stage, why: &str) {
        self.stage(stage, "left out", why, None);
    }

    fn stage(self, stage: Stage, state: &'static str, detail: &str, next: Option<&'static str>) {
        let guide = format!("docs/how-to/ibgda-bring-up.md, step {}", stage.step());
        if self.is_json {
            self.json(&StageLine { stage: stage.name(), state, detail, next, guide });
            return;
        }
        line(&format!("{state:<8} {:<9} {detail}", stage.name()));
        if let Some(next) = next {
            line(&format!("{:<18} → {next}", ""));
            line(&format!("{:<18} → {guide}", ""));
        }
    }

    /// The last line, and the exit status.
    pub(crate) fn end(self, ended: Result<(), Failure>) -> Exit {
        let (exit, stage) = match &ended {
            Ok(()) => (Exit::Passed, None),
            Err(failure) => {
                let detail = whole_text(&failure.error);
                self.stage(failure.stage, "FAILED", &detail, Some(failure.stage.advice()));
                let exit = if failure.is_lacking { Exit::Lacking } else { Exit::Failed };
                (exit, Some(failure.stage))
            }
        };
        let result = match exit {
            Exit::Passed => "passed",
            Exit::Failed => "failed",
            Exit::Lacking => "this host lacks something",
        };
        if self.is_json {
            self.json(&ResultLine { result, stage: stage.map(Stage::name), exit: exit as u8 });
        } else {
            match stage {
                None => line("result: every stage that ran passed"),
                Some(stage) => line(&format!("result: {result}: stage `{stage}`")),
            }
        }
        exit
    }

    #[allow(clippy::unused_self, reason = "called for JSON only")]
    fn json<T: Serialize>(self, value: &T) {
        match serde_json::to_string(value) {
            Ok(text) => line(&text),
            Err(error) => line(&format!("{{\"result\":\"failed\",\"error\":\"{error}\"}}")),
        }
    }
}

/// An error with its causes, as far as it does not name them itself.
pub(crate) fn whole_text(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// Prints and flushes a line, for readers that follow. A closed output does not end the run.
fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once() {
        let inner = anyhow::anyhow!("no such file");
        let outer = inner.context("opening it: no such file").context("stage 3");
        assert_eq!(whole_text(&outer), "stage 3: opening it: no such file");
    }
}
