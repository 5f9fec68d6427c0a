//! Breaches of the rules that exist today: a list in `xtask/rules-known.txt` that only shrinks.
//!
//! ```text
//! dependency p2p-core kernels
//! apart attention-client client device
//! cycle p2p-core backend: cma ring wait
//! ```
//!
//! The first line allows a crate's dependency on another. The second allows references between two sides of a
//! crate. The third allows a cycle among the children of a module, or among fewer of them; `.` is the crate's root.

use std::collections::BTreeSet;

/// An entry. Names of a cycle are sorted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Known {
    /// Crate and dependency, by folder.
    Dependency(String, String),
    /// Crate and two of its top-level modules.
    Apart(String, String, String),
    /// Crate, parent module, its children.
    Cycle(String, String, Vec<String>),
}

impl Known {
    /// Whether the breach `other` is allowed by this entry.
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cycle(folder, parent, names), Self::Cycle(other, at, some)) => {
                folder == other && parent == at && some.iter().all(|name| names.contains(name))
            }
            _ => self == other,
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(str::to_owned);
        match (words.next()?.as_str(), words.next()?, words.next()?) {
            ("dependency", folder, on) => Some(Self::Dependency(folder, on)),
            ("apart", folder, a) => Some(Self::Apart(folder, a, words.next()?)),
            ("cycle", folder, parent) => {
                let mut names: Vec<_> = words.collect();
                names.sort();
                Some(Self::Cycle(folder, parent.strip_suffix(':')?.to_owned(), names))
            }
            _ => None,
        }
    }
}

impl std::fmt::Display for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dependency(folder, on) => write!(f, "dependency {folder} {on}"),
            Self::Apart(folder, a, b) => write!(f, "apart {folder} {a} {b}"),
            Self::Cycle(folder, parent, names) => {
                write!(f, "cycle {folder} {parent}: {}", names.join(" "))
            }
        }
    }
}

/// Reads the list. The error is the number of a line that is no entry.
pub fn parse(text: &str) -> Result<Vec<(usize, Known)>, usize> {
    let lines = text.lines().enumerate().map(|(idx, line)| (idx + 1, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| Known::parse(line).map(|known| (number, known)).ok_or(number))
        .collect()
}

/// The list with every entry cut down to the breaches that are `found`. It never grows.
pub fn shrink(text: &str, found: &BTreeSet<Known>) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        match Known::parse(line) {
            Some(known) => {
                lines.extend(
                    found.iter().filter(|breach| known.covers(breach)).map(Known::to_string),
                );
            }
            None => lines.push(line.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}
