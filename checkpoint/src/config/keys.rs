//! Reads single keys of a `config.json`, and remembers which ones were read.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::ConfigError;

/// The keys that describe the text model.
///
/// Multi-modal configurations keep them in a nested object (`text_config` and the like). Keys of the same name outside
/// may belong to a vision tower, so that only few of them count, see [`get_shared`](Self::get_shared). `null` counts as
/// absent.
///
/// Keys are read by need: a key that nothing asks for may hold anything.
#[derive(Debug)]
pub(crate) struct Keys {
    outer: Map<String, Value>,
    /// Path of the nested object with the text model's keys, if there is one.
    nested: Option<&'static [&'static str]>,
    read: RefCell<BTreeSet<String>>,
}

impl Keys {
    /// Parses `json`. Python's `NaN`, `Infinity` and `-Infinity` are read as texts, so that they are errors where a
    /// number is needed and nowhere else.
    pub(crate) fn parse(json: &str) -> Result<Keys, ConfigError> {
        let value: Value = serde_json::from_str(&without_python_numbers(json))
            .map_err(|error| ConfigError::Json { reason: error.to_string() })?;
        let Value::Object(outer) = value else {
            let reason = format!("it is {}, expected an object", kind(&value));
            return Err(ConfigError::Json { reason });
        };
        let nested = NESTED.iter().copied().find(|path| {
            object_at(&outer, path).is_some_and(|inner| inner.contains_key("hidden_size"))
                && !outer.contains_key("hidden_size")
        });
        Ok(Keys { outer, nested, read: RefCell::default() })
    }

    fn inner(&self) -> Option<&Map<String, Value>> {
        object_at(&self.outer, self.nested?)
    }

    /// The value of a key of the text model; `None` if it is absent or `null`.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_owned());
        present(self.inner().unwrap_or(&self.outer), key)
    }

    /// The value of a key that describes the whole model, such as its quantisation. The text model's own one comes
    /// first.
    pub(crate) fn get_shared(&self, key: &str) -> Option<&Value> {
        self.get(key).or_else(|| present(&self.outer, key))
    }

    /// The value of a key of the outer object only.
    pub(crate) fn get_outer(&self, key: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(key.to_owned());
        present(&self.outer, key)
    }

    /// The first of several spellings that is present, with its name.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] if two spellings are present with different values.
    pub(crate) fn first(
        &self,
        spellings: &[&'static str],
    ) -> Result<Option<(&'static str, &Value)>, ConfigError> {
        let mut first: Option<(&'static str, &Value)> = None;
        for key in spellings {
            match (first, self.get(key)) {
                (None, Some(value)) => first = Some((key, value)),
                (Some((kept, value)), Some(other)) if !are_equal(value, other) => {
                    return Err(ConfigError::Contradiction {
                        first: format!("{kept} = {value}"),
                        second: format!("{key} = {other}"),
                    });
                }
                _ => {}
            }
        }
        Ok(first)
    }

    /// The spellings that a family uses if one of them is present, else all spellings.
    pub(crate) fn own_or_any(
        &self,
        own: &'static [&'static str],
        any: &'static [&'static str],
    ) -> &'static [&'static str] {
        if own.iter().any(|key| self.get(key).is_some()) { own } else { any }
    }

    /// The first of the spellings that is present, or the usual one.
    pub(crate) fn present_of(&self, spellings: &[&'static str]) -> &'static str {
        let present = spellings.iter().find(|key| self.get(key).is_some());
        present.or(spellings.first()).copied().unwrap_or_default()
    }

    pub(crate) fn text(&self, key: &'static str) -> Result<Option<&str>, ConfigError> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(crate) fn flag(&self, key: &'static str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn whole(&self, key: &'static str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, WHOLE, as_whole)
    }

    pub(crate) fn list(&self, key: &'static str) -> Result<Option<&Vec<Value>>, ConfigError> {
        self.typed(key, "a list", Value::as_array)
    }

    fn typed<'a, T>(
        &'a self,
        key: &'static str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| invalid(key, clip(value), expected))
    }

    /// A dimension: present, at least 1, and small enough that a product of two fits into 64 bits.
    pub(crate) fn dim(&self, spellings: &[&'static str]) -> Result<usize, ConfigError> {
        self.bounded(spellings, MAX_DIM)
    }

    /// A number of layers or experts: present, at least 1, and small enough to list.
    pub(crate) fn count(&self, spellings: &[&'static str]) -> Result<u32, ConfigError> {
        self.bounded(spellings, MAX_COUNT).map(|v| v as u32)
    }

    fn bounded(&self, spellings: &[&'static str], max: usize) -> Result<usize, ConfigError> {
        let Some((key, value)) = self.first(spellings)? else {
            return Err(ConfigError::Missing { field: alternatives(spellings) });
        };
        match as_whole(single(value)) {
            Some(found) if (1..=max).contains(&found) => Ok(found),
            _ => Err(invalid(key, clip(value), format!("a whole number from 1 to {max}"))),
        }
    }

    /// Keys of the text model that nothing has read so far, sorted.
    pub(crate) fn unread(&self) -> Vec<String> {
        let read = self.read.borrow();
        let source = self.inner().unwrap_or(&self.outer);
        source.keys().filter(|key| !read.contains(*key)).cloned().collect()
    }
}

fn present<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    map.get(key).filter(|value| !value.is_null())
}

/// The object at the end of a path of names.
fn object_at<'a>(outer: &'a Map<String, Value>, path: &[&str]) -> Option<&'a Map<String, Value>> {
    path.iter().try_fold(outer, |object, name| object.get(*name)?.as_object())
}

/// The number that a list repeats: some configurations have an entry for each layer. Other values are themselves.
fn single(value: &Value) -> &Value {
    match value {
        Value::Array(entries) if entries.windows(2).all(|pair| pair[0] == pair[1]) => {
            entries.first().unwrap_or(value)
        }
        _ => value,
    }
}

/// Returns true for values that mean the same: `8`, `8.0` and `[8, 8]`.
fn are_equal(a: &Value, b: &Value) -> bool {
    let (a, b) = (single(a), single(b));
    a == b || as_whole(a).is_some_and(|whole| as_whole(b) == Some(whole))
}

/// A whole number that is not negative, also when it is written with a fraction of zero.
pub(crate) fn as_whole(value: &Value) -> Option<usize> {
    if let Some(whole) = value.as_u64() {
        return usize::try_from(whole).ok();
    }
    let float = value.as_f64()?;
    (float.fract() == 0.0 && (0.0..=MAX_DIM as f64 * 256.0).contains(&float))
        .then_some(float as usize)
}

/// `a`, or `a (or b, c)`.
fn alternatives(spellings: &[&str]) -> String {
    match spellings {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first, others @ ..] => format!("{first} (or {})", others.join(", ")),
    }
}

pub(crate) fn invalid(
    field: &'static str,
    found: impl std::fmt::Display,
    expected: impl Into<String>,
) -> ConfigError {
    ConfigError::Invalid { field, found: found.to_string(), expected: expected.into() }
}

/// The text of a value, cut to a length that fits a message.
pub(crate) fn clip(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Makes texts of `NaN`, `Infinity` and `-Infinity`: Python writes them as numbers, JSON has none.
fn without_python_numbers(json: &str) -> std::borrow::Cow<'_, str> {
    if !json.contains("NaN") && !json.contains("Infinity") {
        return json.into();
    }
    let mut out = String::with_capacity(json.len());
    let mut rest = json;
    let (mut in_text, mut escaped) = (false, false);
    while let Some(c) = rest.chars().next() {
        let word = (!in_text)
            .then(|| ["NaN", "-Infinity", "Infinity"].into_iter().find(|w| rest.starts_with(w)))
            .flatten();
        if let Some(word) = word {
            out.push('"');
            out.push_str(word);
            out.push('"');
            rest = &rest[word.len()..];
            continue;
        }
        in_text ^= c == '"' && !escaped;
        escaped = in_text && c == '\\' && !escaped;
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out.into()
}

const WHOLE: &str = "a whole number";
/// Paths of the objects in which multi-modal configurations keep the text model's keys.
const NESTED: &[&[&str]] =
    &[&["text_config"], &["llm_config"], &["language_config"], &["thinker_config", "text_config"]];
/// Above any model's vocabulary, context or width.
const MAX_DIM: usize = 1 << 24;
/// Above any model's number of layers or experts.
const MAX_COUNT: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pythons_numbers_become_texts() {
        let json =
            r#"{"a": NaN, "b": "NaN \" Infinity", "c": [-Infinity, Infinity], "hidden_size": 4}"#;
        let keys = Keys::parse(json).unwrap();
        assert_eq!(keys.number("a").unwrap_err().to_string(), "'a' is NaN, expected a number");
        assert_eq!(keys.text("b").unwrap(), Some("NaN \" Infinity"));
        assert_eq!(keys.list("c").unwrap().unwrap(), &["-Infinity", "Infinity"]);
        assert_eq!(keys.dim(&["hidden_size"]).unwrap(), 4);
        assert!(keys.unread().is_empty());
    }

    #[test]
    fn outer_keys_fill_gaps_of_the_nested_ones_only_where_they_describe_the_whole_model() {
        let json = r#"{"a": 1, "b": 2, "text_config": {"a": 3, "hidden_size": 8, "x": []}}"#;
        let keys = Keys::parse(json).unwrap();
        assert_eq!(keys.whole("a").unwrap(), Some(3));
        assert_eq!(keys.whole("b").unwrap(), None);
        assert_eq!(keys.get_shared("a"), Some(&Value::from(3)));
        assert_eq!(keys.get_shared("b"), Some(&Value::from(2)));
        assert_eq!(keys.get_outer("a"), Some(&Value::from(1)));
        assert_eq!(keys.unread(), ["hidden_size", "x"]);
    }

    #[test]
    fn two_spellings_that_differ_are_both_named() {
        let keys = Keys::parse(r#"{"num_experts": 8, "num_local_experts": 16}"#).unwrap();
        let error = keys.count(&["num_experts", "num_local_experts"]).unwrap_err().to_string();
        assert!(error.contains("num_experts = 8"), "{error}");
        assert!(error.contains("num_local_experts = 16"), "{error}");
        for same in ["8", "8.0", "[8, 8]"] {
            let json = format!(r#"{{"num_experts": 8, "num_local_experts": {same}}}"#);
            let keys = Keys::parse(&json).unwrap();
            let found = keys.count(&["num_experts", "num_local_experts"]);
            assert!(found.as_ref().is_ok_and(|n| *n == 8), "{same}: {found:?}");
        }
    }
}
