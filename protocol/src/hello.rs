//! Messages about model and format that client and server exchange while they connect.
//!
//! The bootstrap handshake carries one opaque payload in each direction, and these messages are the
//! payloads. Numbers are little-endian, no field is optional, and a decoder refuses unknown bytes. A
//! server that refuses the client answers with a code and a sentence, [`HelloReject`].

use std::fmt;

use thiserror::Error;

use crate::abi::MAX_HIDDEN;
use crate::dtype::WireDtype;
use crate::geometry::MAX_TOP_K;

/// Longest name of a client or server, bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 128;
/// Version of both hellos.
pub const HELLO_VERSION: u16 = 1;

/// Model and sizes. Client and server must have the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// SHA-256 over sizes, arithmetic and weights of the experts. [`UNKNOWN_FINGERPRINT`](Self::UNKNOWN_FINGERPRINT)
    /// if a client has no experts to compute it from; a server always has one.
    pub fingerprint: [u8; 32],
    /// Values per token.
    pub hidden: u32,
    /// Layers of the model, including dense ones. Frames number layers from 0. A client may not know it, and then
    /// says [`UNKNOWN_LAYERS`](Self::UNKNOWN_LAYERS).
    pub num_layers: u32,
    /// Routed experts of a layer.
    pub num_experts: u32,
    /// Most experts of a token.
    pub top_k: u32,
}

impl ModelShape {
    /// The fingerprint of a client that does not know it: any will do if the sizes agree.
    pub const UNKNOWN_FINGERPRINT: [u8; 32] = [0; 32];
    /// The number of layers of a client that does not know it: it agrees with any.
    pub const UNKNOWN_LAYERS: u32 = 0;

    /// Returns true unless the fingerprint is [`UNKNOWN_FINGERPRINT`](Self::UNKNOWN_FINGERPRINT).
    pub fn has_fingerprint(&self) -> bool {
        self.fingerprint != Self::UNKNOWN_FINGERPRINT
    }

    /// Compares `self`, the client's model, with the `server`'s. Fingerprints are compared if both
    /// are known, and so are numbers of layers.
    ///
    /// # Errors
    /// The [`HelloReject`] to send, which names the first difference.
    pub fn check_against(&self, server: &Self) -> Result<(), HelloReject> {
        // Sizes first: they tell a person more than a hash.
        for (field, client, server) in [
            ("hidden", self.hidden, server.hidden),
            ("num_layers", self.num_layers, server.num_layers),
            ("num_experts", self.num_experts, server.num_experts),
            ("top_k", self.top_k, server.top_k),
        ] {
            let is_unknown =
                field == "num_layers" && [client, server].contains(&Self::UNKNOWN_LAYERS);
            if client != server && !is_unknown {
                return Err(HelloReject::Shape { field, client, server });
            }
        }
        let both_known = self.has_fingerprint() && server.has_fingerprint();
        if both_known && self.fingerprint != server.fingerprint {
            return Err(HelloReject::Fingerprint {
                client: self.fingerprint,
                server: server.fingerprint,
            });
        }
        Ok(())
    }
}

impl fmt::Debug for ModelShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelShape")
            .field("fingerprint", &format_args!("{}", Hex(&self.fingerprint)))
            .field("hidden", &self.hidden)
            .field("num_layers", &self.num_layers)
            .field("num_experts", &self.num_experts)
            .field("top_k", &self.top_k)
            .finish()
    }
}

/// Message of a client.
///
/// # Examples
/// ```
/// use switchyard_protocol::{ClientHello, ModelShape, WireDtype};
///
/// let model =
///     ModelShape { fingerprint: [7; 32], hidden: 2048, num_layers: 48, num_experts: 128, top_k: 8 };
/// let hello = ClientHello {
///     model,
///     client_id: 7,
///     dtype: WireDtype::Bf16,
///     response_dtype: WireDtype::Bf16,
///     name: "trainer-0".to_owned(),
/// };
/// // The server decodes the payload and compares the models.
/// let received = ClientHello::decode(&hello.encode())?;
/// assert_eq!(received, hello);
/// received.model.check_against(&model)?;
/// # Ok::<(), switchyard_protocol::HelloReject>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// The client's model.
    pub model: ModelShape,
    /// Identity in every frame of the client.
    pub client_id: u64,
    /// Element type of its requests.
    pub dtype: WireDtype,
    /// Element type that it wants in responses.
    pub response_dtype: WireDtype,
    /// Name for logs, at most [`MAX_NAME_BYTES`].
    pub name: String,
}

/// Message of a server that accepts the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerHello {
    /// The server's model, equal to the client's.
    pub model: ModelShape,
    /// Random number of the server's process. A restarted server has another one.
    pub incarnation: u64,
    /// Newest placement epoch the server has seen; 0 before the first.
    pub epoch: u64,
    /// Generation of the channel. Every frame on the channel carries it.
    pub generation: u32,
    /// Longest time between two progress updates while the server works, microseconds. A client's
    /// timeout for a silent server should be several times as long.
    pub progress_interval_us: u32,
    /// Name for logs, at most [`MAX_NAME_BYTES`].
    pub name: String,
}

/// Reason why a server refuses a client. The server sends the code and the message.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum HelloReject {
    /// The hello cannot be read.
    #[error("the client's hello cannot be read: {0}")]
    Malformed(#[from] HelloDecodeError),
    /// The models differ in size.
    #[error(
        "the models differ: {field} is {client} at the client and {server} at the server; give both the same model"
    )]
    Shape { field: &'static str, client: u32, server: u32 },
    /// Same sizes, other weights or configuration.
    #[error(
        "the weights differ: their fingerprint is {} at the client and {} at the server; give both the same model",
        Hex(client),
        Hex(server)
    )]
    Fingerprint { client: [u8; 32], server: [u8; 32] },
    /// A frame of the agreed slot has no room for one token.
    #[error("the agreed slot is too small: {0}")]
    Geometry(#[from] crate::geometry::GeometryError),
    /// The server is about to leave.
    #[error("server {server} drains and accepts no new clients; use another replica")]
    Draining { server: String },
    /// The server has not loaded its experts yet.
    #[error("server {server} is not ready yet; try again")]
    NotReady { server: String },
}

impl HelloReject {
    /// First code that this crate uses. Codes below belong to the transport's handshake.
    pub const FIRST_CODE: u16 = 0x100;

    /// Number that is sent with the text.
    #[must_use]
    pub const fn code(&self) -> u16 {
        Self::FIRST_CODE
            + match self {
                Self::Malformed(_) => 0,
                Self::Shape { .. } => 1,
                Self::Fingerprint { .. } => 2,
                Self::Geometry(_) => 3,
                Self::Draining { .. } => 4,
                Self::NotReady { .. } => 5,
            }
    }

    /// Returns true if a server that sent `code` will send it again until a setting changes. `None` for a
    /// code that does not belong to this crate.
    #[must_use]
    pub const fn is_permanent(code: u16) -> Option<bool> {
        match code {
            0x100..=0x103 => Some(true),
            0x104 | 0x105 => Some(false),
            _ => None,
        }
    }
}

/// Bytes that are not a hello.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum HelloDecodeError {
    /// Not a hello of this kind.
    #[error("hello magic is {found:#010x}, expected {expected:#010x}")]
    Magic { found: u32, expected: u32 },
    /// Another version.
    #[error("hello version is {found}, expected {expected}; update the older peer")]
    Version { found: u16, expected: u16 },
    /// Too few or too many bytes.
    #[error("hello of {found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    /// A number outside its range.
    #[error("hello field {field} is {found}, expected {min} to {max}")]
    Field { field: &'static str, found: u64, min: u64, max: u64 },
    /// The name is not UTF-8 or holds control characters.
    #[error("hello name is not printable UTF-8 at byte {at}")]
    Name { at: usize },
}

impl ClientHello {
    /// Bytes for the handshake. A name longer than [`MAX_NAME_BYTES`] is truncated at a character
    /// boundary, and control characters become spaces.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(CLIENT_FIXED_BYTES + MAX_NAME_BYTES);
        put_head(&mut out, CLIENT_MAGIC);
        put_model(&mut out, &self.model);
        out.extend(self.client_id.to_le_bytes());
        out.extend(self.dtype.code().to_le_bytes());
        out.extend(self.response_dtype.code().to_le_bytes());
        put_name(&mut out, &self.name);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`HelloDecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloDecodeError> {
        let mut reader = Reader::new(bytes, CLIENT_MAGIC, CLIENT_FIXED_BYTES)?;
        let model = reader.model(ModelShape::UNKNOWN_LAYERS)?;
        let client_id = u64::from_le_bytes(reader.take());
        let dtype = reader.dtype("dtype")?;
        let response_dtype = reader.dtype("response_dtype")?;
        let name = reader.name(CLIENT_FIXED_BYTES)?;
        Ok(Self { model, client_id, dtype, response_dtype, name })
    }
}

impl ServerHello {
    /// Bytes for the handshake. A name longer than [`MAX_NAME_BYTES`] is truncated at a character
    /// boundary, and control characters become spaces.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SERVER_FIXED_BYTES + MAX_NAME_BYTES);
        put_head(&mut out, SERVER_MAGIC);
        put_model(&mut out, &self.model);
        out.extend(self.incarnation.to_le_bytes());
        out.extend(self.epoch.to_le_bytes());
        out.extend(self.generation.to_le_bytes());
        out.extend(self.progress_interval_us.to_le_bytes());
        put_name(&mut out, &self.name);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`HelloDecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloDecodeError> {
        let mut reader = Reader::new(bytes, SERVER_MAGIC, SERVER_FIXED_BYTES)?;
        let model = reader.model(1)?;
        let incarnation = u64::from_le_bytes(reader.take());
        let epoch = u64::from_le_bytes(reader.take());
        let generation = u32::from_le_bytes(reader.take());
        let progress_interval_us = u32::from_le_bytes(reader.take());
        let name = reader.name(SERVER_FIXED_BYTES)?;
        Ok(Self { model, incarnation, epoch, generation, progress_interval_us, name })
    }
}

/// Reads little-endian numbers. `new` checks that the fixed part is complete, so `take` cannot run out of
/// bytes. If the constants were wrong, `take` would return zeros, which fail the checks; it never panics.
struct Reader<'a> {
    bytes: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], magic: u32, fixed_bytes: usize) -> Result<Self, HelloDecodeError> {
        if bytes.len() < fixed_bytes {
            return Err(HelloDecodeError::Length { found: bytes.len(), expected: fixed_bytes });
        }
        let mut reader = Self { bytes, rest: bytes };
        let found = u32::from_le_bytes(reader.take());
        if found != magic {
            return Err(HelloDecodeError::Magic { found, expected: magic });
        }
        let found = u16::from_le_bytes(reader.take());
        if found != HELLO_VERSION {
            return Err(HelloDecodeError::Version { found, expected: HELLO_VERSION });
        }
        let reserved = u16::from_le_bytes(reader.take());
        check_range("reserved", reserved.into(), 0, 0)?;
        Ok(reader)
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((head, rest)) = self.rest.split_first_chunk() else {
            self.rest = &[];
            return [0; N];
        };
        self.rest = rest;
        *head
    }

    /// `min_layers` is the least number of layers: a client may leave it open, a server may not.
    fn model(&mut self, min_layers: u32) -> Result<ModelShape, HelloDecodeError> {
        let fingerprint = self.take();
        let mut number = |field, max: u32| {
            let found = u32::from_le_bytes(self.take());
            let min = if field == "num_layers" { min_layers } else { 1 };
            check_range(field, found.into(), min.into(), max.into()).map(|()| found)
        };
        Ok(ModelShape {
            fingerprint,
            hidden: number("hidden", MAX_HIDDEN)?,
            num_layers: number("num_layers", MAX_LAYERS)?,
            num_experts: number("num_experts", MAX_EXPERTS)?,
            top_k: number("top_k", MAX_TOP_K as u32)?,
        })
    }

    fn dtype(&mut self, field: &'static str) -> Result<WireDtype, HelloDecodeError> {
        let code = u16::from_le_bytes(self.take());
        WireDtype::from_code(code).ok_or(HelloDecodeError::Field {
            field,
            found: code.into(),
            min: 1,
            max: 4,
        })
    }

    fn name(&mut self, fixed_bytes: usize) -> Result<String, HelloDecodeError> {
        let name_bytes = u32::from_le_bytes(self.take()) as usize;
        check_range("name length", name_bytes as u64, 0, MAX_NAME_BYTES as u64)?;
        let expected = fixed_bytes + name_bytes;
        if self.bytes.len() != expected {
            return Err(HelloDecodeError::Length { found: self.bytes.len(), expected });
        }
        let name = std::str::from_utf8(self.rest)
            .map_err(|error| HelloDecodeError::Name { at: error.valid_up_to() })?;
        // Names go to logs and terminals, so control characters from peers are refused.
        match name.find(char::is_control) {
            Some(at) => Err(HelloDecodeError::Name { at }),
            None => Ok(name.to_owned()),
        }
    }
}

fn check_range(
    field: &'static str,
    found: u64,
    min: u64,
    max: u64,
) -> Result<(), HelloDecodeError> {
    if (min..=max).contains(&found) {
        Ok(())
    } else {
        Err(HelloDecodeError::Field { field, found, min, max })
    }
}

fn put_head(out: &mut Vec<u8>, magic: u32) {
    out.extend(magic.to_le_bytes());
    out.extend(HELLO_VERSION.to_le_bytes());
    out.extend([0; 2]);
}

fn put_model(out: &mut Vec<u8>, model: &ModelShape) {
    out.extend(model.fingerprint);
    for number in [model.hidden, model.num_layers, model.num_experts, model.top_k] {
        out.extend(number.to_le_bytes());
    }
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    let printable: String = name.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let name = &printable[..printable.floor_char_boundary(MAX_NAME_BYTES)];
    out.extend((name.len() as u32).to_le_bytes());
    out.extend(name.as_bytes());
}

/// Bytes as hexadecimal digits.
struct Hex<'a>(&'a [u8; 32]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

const CLIENT_MAGIC: u32 = u32::from_le_bytes(*b"SYCH");
const SERVER_MAGIC: u32 = u32::from_le_bytes(*b"SYSH");
const HEAD_BYTES: usize = 4 + 2 + 2;
const MODEL_BYTES: usize = 32 + 4 * 4;
const CLIENT_FIXED_BYTES: usize = HEAD_BYTES + MODEL_BYTES + 8 + 2 + 2 + 4;
const SERVER_FIXED_BYTES: usize = HEAD_BYTES + MODEL_BYTES + 8 + 8 + 4 + 4 + 4;
const MAX_LAYERS: u32 = 1 << 16;
const MAX_EXPERTS: u32 = 1 << 20;
