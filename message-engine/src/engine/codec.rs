//! Encoding of consecutive fields: little-endian, with each length checked before it is used.

/// A text that says why bytes could not be decoded.
pub(super) type DecodeError = String;

/// Decodes fields from the front.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn bytes(&mut self, what: &str, len: usize) -> Result<&'a [u8], DecodeError> {
        let Some((bytes, rest)) = self.rest.split_at_checked(len) else {
            return Err(format!("it ends within `{what}`"));
        };
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], DecodeError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(what, N)?);
        Ok(out)
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, DecodeError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads bytes that are preceded by their number, at most `most`.
    pub(super) fn counted(&mut self, what: &str, most: usize) -> Result<&'a [u8], DecodeError> {
        let len = usize::from(self.u16(what)?);
        if len > most {
            return Err(format!("`{what}` has {len} bytes, at most {most} are allowed"));
        }
        self.bytes(what, len)
    }

    /// Reads printable ASCII that is preceded by its length.
    pub(super) fn text(&mut self, what: &str, most: usize) -> Result<String, DecodeError> {
        let bytes = self.counted(what, most)?;
        if !bytes.iter().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("`{what}` is not printable ASCII"));
        }
        Ok(bytes.iter().map(|byte| char::from(*byte)).collect())
    }

    pub(super) fn end(&self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(format!("{more} bytes follow the last field")),
        }
    }
}

/// Appends at most 65535 bytes, preceded by their number.
pub(super) fn put_counted(out: &mut Vec<u8>, bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(usize::from(u16::MAX))];
    out.extend((bytes.len() as u16).to_le_bytes());
    out.extend(bytes);
}
