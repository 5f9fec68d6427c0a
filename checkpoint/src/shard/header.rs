//! The header of a safetensors file: a JSON object with an entry for each tensor.
//!
//! A header comes from a download and may have 100 MB. Parsing it keeps nothing but entries of bounded size: a list of
//! dimensions ends at [`MAX_DIMS`], and values that no reader needs are skipped.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::dtype::DType;

/// A tensor of the header.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub dtype: DType,
    pub shape: Box<[usize]>,
    /// Bytes behind the header.
    pub bytes: Range<usize>,
}

/// Tensors in the order of their names, and the names that are aliases.
pub(super) type Tensors = (Vec<(Box<str>, Entry)>, Vec<String>);

/// Parses and checks a header. Returns the tensors and the bytes of all of them.
///
/// # Errors
/// The reason why it is no valid header.
pub(super) fn parse(header: &[u8]) -> Result<(Tensors, usize), String> {
    let mut json = serde_json::Deserializer::from_slice(header);
    // A list that grows by doubling would take the memory of the header once more.
    let capacity = header.windows(KEY.len()).filter(|word| *word == KEY).count().min(MAX_TENSORS);
    let header = json.deserialize_map(Entries { capacity }).map_err(|error| error.to_string())?;
    json.end().map_err(|error| error.to_string())?;
    let Header { mut entries, metadata } = header;
    entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("tensor '{}' is listed twice", pair[0].0));
    }
    entries.sort_unstable_by_key(|(_, entry)| (entry.bytes.start, entry.bytes.end));
    let data_bytes = check_order(&entries)?;
    let mut tensors: Vec<(Box<str>, Entry)> =
        entries.into_iter().map(|(name, entry)| (name.into(), entry)).collect();
    tensors.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    let mut aliases: BTreeMap<&str, Entry> = BTreeMap::new();
    for (alias, stored) in &metadata {
        if find(&tensors, alias).is_none()
            && let Some((_, entry)) = find(&tensors, stored)
        {
            aliases.entry(alias).or_insert_with(|| entry.clone());
        }
    }
    let names = aliases.keys().map(|alias| (*alias).to_owned()).collect();
    tensors.extend(aliases.into_iter().map(|(alias, entry)| (alias.into(), entry)));
    tensors.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    Ok(((tensors, names), data_bytes))
}

/// The tensor of that name in a list in the order of names.
pub(super) fn find<'a>(
    tensors: &'a [(Box<str>, Entry)],
    name: &str,
) -> Option<(&'a str, &'a Entry)> {
    let idx = tensors.binary_search_by(|(found, _)| (**found).cmp(name)).ok()?;
    tensors.get(idx).map(|(name, entry)| (&**name, entry))
}

/// Checks that tensors in the order of their bytes leave no gap and do not overlap. Returns the end of the last one.
fn check_order(entries: &[(Cow<'_, str>, Entry)]) -> Result<usize, String> {
    let mut end = 0;
    let mut before = "the header";
    for (name, entry) in entries {
        let start = entry.bytes.start;
        if start < end {
            return Err(format!(
                "tensors '{before}' and '{name}' overlap: '{name}' starts at byte {start}, '{before}' ends at {end}"
            ));
        }
        if start > end {
            return Err(format!(
                "{} bytes between {before} and tensor '{name}' belong to no tensor",
                start - end
            ));
        }
        (before, end) = (name, entry.bytes.end);
    }
    Ok(end)
}

/// A header as it stands in the file, with every entry checked by itself.
struct Header<'a> {
    entries: Vec<(Cow<'a, str>, Entry)>,
    /// Names of `__metadata__` with their texts.
    metadata: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

/// Reads a header with room for this many entries.
struct Entries {
    capacity: usize,
}

impl<'de> Visitor<'de> for Entries {
    type Value = Header<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header<'de>, A::Error> {
        let entries = Vec::with_capacity(self.capacity);
        let mut header = Header { entries, metadata: Vec::new() };
        while let Some(Text(name)) = map.next_key()? {
            if name == METADATA {
                map.next_value_seed(Metadata(&mut header.metadata))?;
                continue;
            }
            if name.len() > MAX_NAME_BYTES {
                let found = name.len();
                return Err(A::Error::custom(format!(
                    "a tensor's name has {found} bytes, at most {MAX_NAME_BYTES} are allowed"
                )));
            }
            if header.entries.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!(
                    "it lists too many tensors, at most {MAX_TENSORS} are allowed"
                )));
            }
            let entry: RawEntry<'de> = map
                .next_value()
                .map_err(|error| A::Error::custom(format!("tensor '{name}': {error}")))?;
            let entry = entry.check(&name).map_err(A::Error::custom)?;
            header.entries.push((name, entry));
        }
        Ok(header)
    }
}

/// Keeps the texts of `__metadata__`, as far as they may be aliases.
struct Metadata<'a, 'de>(&'a mut Vec<(Cow<'de, str>, Cow<'de, str>)>);

impl<'de> DeserializeSeed<'de> for Metadata<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_none<E: Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Text(name)) = map.next_key()? {
            let Text(text) = map.next_value()?;
            if !text.is_empty() && self.0.len() < MAX_ALIASES {
                self.0.push((name, text));
            }
        }
        Ok(())
    }
}

/// A text, borrowed from the header if it has no escapes. Any other value is skipped and reads as an empty text.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_i64<E: Error>(self, _: i64) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_u64<E: Error>(self, _: u64) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_f64<E: Error>(self, _: f64) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_unit<E: Error>(self) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Text<'de>, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Text(Cow::Borrowed("")))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Text<'de>, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Text(Cow::Borrowed("")))
            }
        }
        deserializer.deserialize_any(Texts)
    }
}

/// An entry whose parts do not yet fit together for certain. Other keys are skipped.
#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Text<'a>,
    shape: Dims,
    data_offsets: [usize; 2],
}

impl RawEntry<'_> {
    fn check(self, name: &str) -> Result<Entry, String> {
        let shape = self.shape.0;
        let Some(dtype) = DType::from_name(&self.dtype.0) else {
            let found: String = self.dtype.0.chars().take(40).collect();
            return Err(format!("tensor '{name}' has the unknown dtype '{found}'"));
        };
        let bits = shape.iter().try_fold(dtype.size_bits(), |n, dim| n.checked_mul(*dim));
        let Some(bits) = bits else {
            return Err(format!("tensor '{name}' of shape {shape:?} overflows 64 bits"));
        };
        let [start, end] = self.data_offsets;
        let found = end.checked_sub(start);
        if bits % 8 != 0 || found != Some(bits / 8) {
            return Err(format!(
                "tensor '{name}' of shape {shape:?} and dtype {dtype} needs {} bytes, its data_offsets are {start} to {end}",
                bits.div_ceil(8),
            ));
        }
        Ok(Entry { dtype, shape, bytes: start..end })
    }
}

/// The dimensions of a tensor, at most [`MAX_DIMS`].
struct Dims(Box<[usize]>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Lists;
        impl<'de> Visitor<'de> for Lists {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let (mut dims, mut len) = ([0; MAX_DIMS], 0);
                while let Some(dim) = seq.next_element()? {
                    let Some(place) = dims.get_mut(len) else {
                        return Err(A::Error::invalid_length(MAX_DIMS + 1, &self));
                    };
                    *place = dim;
                    len += 1;
                }
                Ok(Dims(dims[..len].into()))
            }
        }
        deserializer.deserialize_seq(Lists)
    }
}

/// The last key of every tensor's entry.
const KEY: &[u8] = b"data_offsets";
/// The entry of a header that is no tensor.
const METADATA: &str = "__metadata__";
/// Above the dimensions of any tensor of a model.
const MAX_DIMS: usize = 8;
/// Above the length of any tensor's name.
const MAX_NAME_BYTES: usize = 4096;
/// Above the tensors of any single file.
const MAX_TENSORS: usize = 1 << 20;
/// Above the aliases of any single file; more texts are skipped.
const MAX_ALIASES: usize = 1 << 16;
