//! Text of other processes, and of settings, that people read in a terminal.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns true for characters that change how the text around them is shown: control characters,
/// line breaks, and characters that change the direction of text.
pub fn is_disruptive(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// `text` with disruptive characters other than those of `kept` as `\u001b`. In JSON this is the same character.
pub fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_escaped = |character: char| is_disruptive(character) && !kept.contains(&character);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_escaped(character) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\u{:04x}", u32::from(character));
        } else {
            shown.push(character);
        }
    }
    Cow::Owned(shown)
}

/// A URL or a list of URLs for a message: with `…` in place of user names and passwords.
pub fn without_credentials(url: &str) -> Cow<'_, str> {
    let Some(at) = url.rfind('@') else { return Cow::Borrowed(url) };
    let start = url[..at].find("://").map_or(0, |scheme| scheme + "://".len());
    Cow::Owned(format!("{}…{}", &url[..start], &url[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_url_has_no_password() {
        for (url, shown) in [
            ("http://h:1/a", "http://h:1/a"),
            ("http://u:p@h:1", "http://…@h:1"),
            ("dns://p@:p@h:1", "dns://…@h:1"),
            ("http://a:1,http://u:p@h", "http://…@h"),
            ("u:p@h", "…@h"),
            ("p@http://h", "…@http://h"),
            ("", ""),
        ] {
            assert_eq!(without_credentials(url), shown);
        }
    }

    #[test]
    fn disruptive_characters_are_escaped_and_json_keeps_its_meaning() {
        let text = "a\u{1b}[2J\u{7}\u{9b}\u{202e}é⟦·\n";
        assert_eq!(escaped(text, &['\n']), "a\\u001b[2J\\u0007\\u009b\\u202eé⟦·\n");
        assert!(!escaped(text, &[]).contains(is_disruptive));
        let json = serde_json::to_string(text).unwrap();
        let shown = escaped(&json, &['\n']);
        assert!(!shown.contains(is_disruptive), "{shown:?}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
        assert!(matches!(escaped("plain · text", &[]), Cow::Borrowed(_)));
    }
}
