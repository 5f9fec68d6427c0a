//! What client and server say about model and format while they connect.
//!
//! The bootstrap handshake carries one opaque payload each way; these are its contents. Numbers are
//! little-endian, nothing is optional, and a decoder refuses every byte it does not understand. A
//! server that does not want the client answers with a code and a sentence, [`HelloReject`].

use std::fmt;

use thiserror::Error;

use crate::abi::MAX_HIDDEN;
use crate::dtype::WireDtype;
use crate::geometry::MAX_TOP_K;

/// Longest name of a client or server, bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 128;
/// Version of both hellos.
pub const HELLO_VERSION: u16 = 1;

/// What both sides must agree on: whose experts these are and how large their tokens are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// SHA-256 over configuration and tensor index.
    pub fingerprint: [u8; 32],
    /// Values per token.
    pub hidden: u32,
    /// Layers of the model, dense ones included; frames number layers from 0.
    pub num_layers: u32,
    /// Routed experts of a layer.
    pub num_experts: u32,
    /// Most experts of a token.
    pub top_k: u32,
}

impl ModelShape {
    /// The first number in which `self`, the client's model, differs from the `server`'s.
    ///
    /// # Errors
    /// The [`HelloReject`] to answer with.
    pub fn check_against(&self, server: &Self) -> Result<(), HelloReject> {
        // Sizes first: they say more to a person than a hash.
        for (field, client, server) in [
            ("hidden", self.hidden, server.hidden),
            ("num_layers", self.num_layers, server.num_layers),
            ("num_experts", self.num_experts, server.num_experts),
            ("top_k", self.top_k, server.top_k),
        ] {
            if client != server {
                return Err(HelloReject::Shape { field, client, server });
            }
        }
        if self.fingerprint != server.fingerprint {
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

/// What a client says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// The client's model.
    pub model: ModelShape,
    /// Identity in every frame of the client.
    pub client_id: u64,
    /// Element type of its requests.
    pub dtype: WireDtype,
    /// Element type it wants in answers.
    pub response_dtype: WireDtype,
    /// Name for logs, at most [`MAX_NAME_BYTES`].
    pub name: String,
}

/// What a server says when it takes the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerHello {
    /// The server's model, equal to the client's.
    pub model: ModelShape,
    /// Differs whenever the process is another one.
    pub incarnation: u64,
    /// Newest placement epoch the server has seen; 0 before the first.
    pub epoch: u64,
    /// Generation of the channel: what every frame on it must carry.
    pub generation: u32,
    /// Longest time between two signs of progress while the server works, microseconds. A deadline
    /// for silence should be several times this.
    pub progress_interval_us: u32,
    /// Name for logs, at most [`MAX_NAME_BYTES`].
    pub name: String,
}

/// Why a server does not want a client. Travels as a code and this text.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HelloReject {
    /// The hello cannot be read.
    #[error("the client's hello cannot be read: {0}")]
    Malformed(#[from] HelloDecodeError),
    /// The models differ in size.
    #[error(
        "the models differ: {field} is {client} at the client and {server} at the server; give both the same model"
    )]
    Shape {
        /// Number that differs.
        field: &'static str,
        /// The client's.
        client: u32,
        /// The server's.
        server: u32,
    },
    /// Same sizes, other weights or configuration.
    #[error(
        "the models differ: fingerprint is {} at the client and {} at the server; give both the same model",
        Hex(client),
        Hex(server)
    )]
    Fingerprint {
        /// The client's.
        client: [u8; 32],
        /// The server's.
        server: [u8; 32],
    },
    /// No token fits a frame of the agreed slot.
    #[error("the agreed slot is too small: {0}")]
    Geometry(#[from] crate::geometry::GeometryError),
    /// The server leaves.
    #[error("server {server} drains and takes no new clients; use another replica")]
    Draining {
        /// Name of the server.
        server: String,
    },
    /// The server has not loaded its experts yet.
    #[error("server {server} is not ready yet; try again")]
    NotReady {
        /// Name of the server.
        server: String,
    },
}

impl HelloReject {
    /// First code that this crate uses: those below belong to the transport's handshake.
    pub const FIRST_CODE: u16 = 0x100;

    /// Number that travels with the text.
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

    /// Whether a server that answered `code` will answer the same until somebody changes a setting.
    /// `None` for a code that is not this crate's.
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
pub enum HelloDecodeError {
    /// Not a hello of this kind.
    #[error("hello magic is {found:#010x}, expected {expected:#010x}")]
    Magic {
        /// Value found.
        found: u32,
        /// Value expected.
        expected: u32,
    },
    /// Another version.
    #[error("hello version is {found}, expected {expected}; update the older peer")]
    Version {
        /// Version found.
        found: u16,
        /// Version of this build.
        expected: u16,
    },
    /// Too few or too many bytes.
    #[error("hello of {found} bytes, expected {expected}")]
    Length {
        /// Bytes found.
        found: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// A number outside its range.
    #[error("hello field {field} is {found}, expected {min} to {max}")]
    Field {
        /// Field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// The name is not UTF-8 or holds control characters.
    #[error("hello name is not printable UTF-8 at byte {at}")]
    Name {
        /// First bad byte.
        at: usize,
    },
}

impl ClientHello {
    /// Bytes for the handshake. A longer name is cut at the end of a character, and control
    /// characters become spaces.
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
        let model = reader.model()?;
        let client_id = u64::from_le_bytes(reader.take());
        let dtype = reader.dtype("dtype")?;
        let response_dtype = reader.dtype("response_dtype")?;
        let name = reader.name(CLIENT_FIXED_BYTES)?;
        Ok(Self { model, client_id, dtype, response_dtype, name })
    }
}

impl ServerHello {
    /// Bytes for the handshake. A longer name is cut at the end of a character, and control
    /// characters become spaces.
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
        let model = reader.model()?;
        let incarnation = u64::from_le_bytes(reader.take());
        let epoch = u64::from_le_bytes(reader.take());
        let generation = u32::from_le_bytes(reader.take());
        let progress_interval_us = u32::from_le_bytes(reader.take());
        let name = reader.name(SERVER_FIXED_BYTES)?;
        Ok(Self { model, incarnation, epoch, generation, progress_interval_us, name })
    }
}

/// Reads little-endian numbers. `new` has checked that the fixed part is there, so `take` cannot run
/// out; should the constants be wrong, it yields zeros, which fail the checks, and never panics.
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

    fn model(&mut self) -> Result<ModelShape, HelloDecodeError> {
        let fingerprint = self.take();
        let mut number = |field, max: u32| {
            let found = u32::from_le_bytes(self.take());
            check_range(field, found.into(), 1, max.into()).map(|()| found)
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
        // Names go to logs and terminals: no escape sequences from peers.
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
