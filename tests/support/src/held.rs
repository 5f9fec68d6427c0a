//! Resources of this process, for a test that includes this file by its path.

#![allow(dead_code, unused_imports, reason = "every test uses a part of it")]

#[path = "descriptors.rs"]
mod descriptors;
#[path = "resources.rs"]
mod resources;

pub use self::resources::*;
