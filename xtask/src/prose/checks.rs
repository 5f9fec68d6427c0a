//! Patterns that the house style forbids.

use super::text::{Paragraph, Sentence, num_words};
use crate::source::Kind;

/// A kind of breach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flaw {
    /// A sentence that begins with *who, whoever, what, whose, which* or *where* as its subject.
    Headless,
    /// A word or phrase of the list below.
    Word,
    /// A sentence of more than [`MAX_SENTENCE_WORDS`], in documentation.
    LongSentence,
    /// A paragraph of more than [`MAX_PARAGRAPH_WORDS`], in `docs/` and the README.
    LongParagraph,
}

/// The style asks for about 25.
pub const MAX_SENTENCE_WORDS: usize = 30;
/// Words of one paragraph.
pub const MAX_PARAGRAPH_WORDS: usize = 120;

/// A flaw and its place.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Line in the file, from 1.
    pub line: usize,
    /// Its kind.
    pub flaw: Flaw,
    /// The text, for the reader of the report.
    pub text: String,
}

impl Flaw {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 4] =
        [Self::Headless, Self::Word, Self::LongSentence, Self::LongParagraph];

    /// Its name in the table of ceilings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Headless => "headless",
            Self::Word => "words",
            Self::LongSentence => "sentences",
            Self::LongParagraph => "paragraphs",
        }
    }
}

/// Looks at one paragraph.
pub fn check(paragraph: &Paragraph, has_paragraph_limit: bool, findings: &mut Vec<Finding>) {
    for sentence in paragraph.sentences() {
        let mut add =
            |flaw, text: String| findings.push(Finding { line: sentence.line, flaw, text });
        if is_headless(&sentence.text) {
            add(Flaw::Headless, start_of(&sentence));
        }
        for phrase in banned(&sentence.text) {
            add(Flaw::Word, format!("\"{phrase}\" in: {}", sentence.text));
        }
        let num_words = num_words(&sentence.text);
        if paragraph.kind == Kind::Doc && num_words > MAX_SENTENCE_WORDS {
            add(Flaw::LongSentence, format!("{num_words} words: {}", start_of(&sentence)));
        }
    }
    let num_words = paragraph.num_words();
    if has_paragraph_limit && num_words > MAX_PARAGRAPH_WORDS {
        let text = format!("{num_words} words: {}", start_of(&paragraph.sentences()[0]));
        findings.push(Finding { line: paragraph.line(), flaw: Flaw::LongParagraph, text });
    }
}

fn start_of(sentence: &Sentence) -> String {
    const MAX_CHARS: usize = 90;
    match sentence.text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &sentence.text[..end]),
        None => sentence.text.clone(),
    }
}

fn is_headless(text: &str) -> bool {
    let text = text.trim_start_matches(['*', '_', '"', '(', '“']);
    let first = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    match first {
        "Who" | "Whoever" | "Whose" | "What" | "Whatever" | "Which" => !text.ends_with('?'),
        // "Where there is no GPU, tests are skipped" has a subject of its own.
        "Where" | "Wherever" => !text.ends_with('?') && !text.contains(','),
        _ => false,
    }
}

/// Words and phrases, with those before and after that make a use of them plain.
const BANNED: [(&str, &[&str], &[&str]); 19] = [
    ("nobody", &[], &[]),
    ("somebody", &[], &[]),
    ("of which", &[], &[]),
    ("such as have", &[], &[]),
    ("those that", &[], &[]),
    ("seat", &[], &[]),
    ("seats", &[], &[]),
    // Conditions are met.
    ("met", &["is", "are", "was", "were", "be", "been", "not"], &[]),
    ("told", &[], &[]),
    ("aside", &["set", "sets"], &["from"]),
    ("doom", &[], &[]),
    ("doomed", &[], &[]),
    ("obey", &[], &[]),
    ("obeys", &[], &[]),
    ("obeyed", &[], &[]),
    ("let go", &[], &[]),
    ("lets go", &[], &[]),
    ("letting go", &[], &[]),
    ("in good hands", &[], &[]),
];

/// The banned words and phrases in a text, each as often as it occurs.
fn banned(text: &str) -> Vec<&'static str> {
    let lower = text.to_lowercase();
    let is_separator = |c: char| !(c.is_alphanumeric() || c == '`' || c == '_');
    let words: Vec<&str> = lower.split(is_separator).filter(|word| !word.is_empty()).collect();
    let mut found = Vec::new();
    for at in 0..words.len() {
        for (phrase, before, after) in &BANNED {
            let len = phrase.split(' ').count();
            let is_it =
                phrase.split(' ').enumerate().all(|(idx, word)| words.get(at + idx) == Some(&word));
            let is_plain = at.checked_sub(1).is_some_and(|at| before.contains(&words[at]))
                || words.get(at + len).is_some_and(|word| after.contains(word));
            if is_it && !is_plain {
                found.push(*phrase);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::text::{of_markdown, of_source};
    use super::*;

    fn flaws(paragraphs: &[Paragraph]) -> Vec<(usize, Flaw)> {
        let mut findings = Vec::new();
        paragraphs.iter().for_each(|paragraph| check(paragraph, true, &mut findings));
        findings.iter().map(|finding| (finding.line, finding.flaw)).collect()
    }

    #[test]
    fn headless_relatives_are_found() {
        let text = "/// What is kept back goes.\nstruct A;\n// Who comes later waits. Where.\n/// What is it?\n\
                    /// The peer. *Which* one is sent.\n/// Where there is no GPU, it skips. Whatsoever holds.\n";
        assert_eq!(
            flaws(&of_source(text)),
            [(1, Flaw::Headless), (3, Flaw::Headless), (3, Flaw::Headless), (5, Flaw::Headless)]
        );
        assert!(flaws(&of_markdown("# What it is\n\nPlain.\n")).is_empty());
    }

    #[test]
    fn banned_words_are_found_and_plain_uses_are_not() {
        let text = "Nobody is told. Seats let go of it, some of which are far.\n\nThe condition is met, aside from one \
                    set aside; `told` is a name.";
        let found = flaws(&of_markdown(text));
        assert_eq!(found, [(1, Flaw::Word); 5]);
    }

    #[test]
    fn long_sentences_count_in_documentation() {
        let long = "word ".repeat(31);
        assert_eq!(flaws(&of_markdown(&long)), [(1, Flaw::LongSentence)]);
        assert_eq!(flaws(&of_source(&format!("/// {long}"))), [(1, Flaw::LongSentence)]);
        assert!(flaws(&of_source(&format!("// {long}"))).is_empty());
        assert!(flaws(&of_markdown(&"word ".repeat(30))).is_empty());
    }

    #[test]
    fn long_paragraphs_are_found() {
        let text = "Ten words are in this one, and it is short. ".repeat(13);
        assert_eq!(flaws(&of_markdown(&text)), [(1, Flaw::LongParagraph)]);
        assert!(flaws(&of_markdown(&text[..text.len() / 2])).is_empty());
    }
}
