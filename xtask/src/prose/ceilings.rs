//! The table of ceilings, `xtask/prose-ceilings.toml`: for each folder and flaw, how many are allowed.

use std::collections::BTreeMap;

use super::checks::Flaw;

/// A number for each folder and flaw. A missing one is zero.
pub type Counts = BTreeMap<(String, Flaw), usize>;

/// Reads the table. The error is the number of a line that does not belong there.
pub fn parse(text: &str) -> Result<Counts, usize> {
    let mut counts = Counts::new();
    let mut folder = String::new();
    for (idx, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix("[\"").and_then(|rest| rest.strip_suffix("\"]")) {
            folder = name.to_owned();
            continue;
        }
        let entry = line.split_once('=').and_then(|(name, number)| {
            let flaw = Flaw::ALL.into_iter().find(|flaw| flaw.name() == name.trim())?;
            Some((flaw, number.trim().parse().ok()?))
        });
        let (flaw, number) = entry.ok_or(idx + 1)?;
        counts.insert((folder.clone(), flaw), number);
    }
    Ok(counts)
}

/// Writes the table.
pub fn write(counts: &Counts) -> String {
    let mut text = "# How many flaws of each kind a folder may have; a missing number is 0. `cargo xtask prose` counts \
                    them,\n# `cargo xtask prose --write` lowers these numbers to what it finds.\n"
        .to_owned();
    let mut folder = None;
    for ((name, flaw), number) in counts.iter().filter(|(_, number)| **number > 0) {
        if folder != Some(name) {
            text += &format!("\n[\"{name}\"]\n");
            folder = Some(name);
        }
        text += &format!("{} = {number}\n", flaw.name());
    }
    text
}

/// The lower number of each pair: ceilings that never rise.
pub fn lowered(ceilings: &Counts, found: &Counts) -> Counts {
    let lower = |(key, ceiling): (&(String, Flaw), &usize)| {
        (key.clone(), *ceiling.min(found.get(key).unwrap_or(&0)))
    };
    ceilings.iter().map(lower).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(rows: &[(&str, Flaw, usize)]) -> Counts {
        rows.iter().map(|(folder, flaw, number)| (((*folder).to_owned(), *flaw), *number)).collect()
    }

    #[test]
    fn a_table_survives_writing_and_reading() {
        let all = counts(&[
            ("a/b", Flaw::Headless, 3),
            ("a/b", Flaw::Word, 1),
            (".", Flaw::LongSentence, 7),
        ]);
        assert_eq!(parse(&write(&all)), Ok(all));
        assert_eq!(parse("[\"a\"]\nunknown = 3\n"), Err(2));
    }

    #[test]
    fn ceilings_only_fall() {
        let old = counts(&[("a", Flaw::Headless, 3), ("a", Flaw::Word, 1), ("b", Flaw::Word, 4)]);
        let found = counts(&[("a", Flaw::Headless, 5), ("b", Flaw::Word, 2), ("c", Flaw::Word, 9)]);
        let new = counts(&[("a", Flaw::Headless, 3), ("a", Flaw::Word, 0), ("b", Flaw::Word, 2)]);
        assert_eq!(lowered(&old, &found), new);
    }
}
