//! Macros for `impl` blocks of the traits of a transport: forwarding, and trivial answers.

/// Implements methods of [`Endpoint`](crate::endpoint::Endpoint), [`Batch`](crate::endpoint::Batch) or
/// [`Progress`](crate::endpoint::Progress) as calls of the same methods of another endpoint.
///
/// Use it inside an `impl` block. Name the methods, then the other endpoint as an expression that begins with `self`.
///
/// ```
/// use std::{os::fd::BorrowedFd, ptr::NonNull, time::Instant};
///
/// use switchyard_p2p_core::endpoint::{Batch, Endpoint, Progress};
/// use switchyard_p2p_core::{forward_endpoint, AnyEndpoint, PostError, RemoteRange, SlotKey};
///
/// /// Counts the flags that it adds to.
/// struct Counting {
///     inner: AnyEndpoint,
///     num_flags: u64,
/// }
///
/// impl Endpoint for Counting {
///     type RemoteKey = SlotKey;
///     forward_endpoint! {
///         kind, register, direct, put, get, fence, quiet, wake, wait_fd => self.inner
///     }
///
///     fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
///         self.num_flags += 1;
///         self.inner.add_flag(dst, value)
///     }
/// }
///
/// impl Batch for Counting {
///     forward_endpoint! { begin_batch, flush => self.inner }
/// }
///
/// impl Progress for Counting {
///     forward_endpoint! {
///         driver, health, has_room, has_room_to_spare, try_fence, is_settled, marks => self.inner
///     }
///
///     fn add_flag_lazily(
///         &mut self,
///         dst: RemoteRange<SlotKey>,
///         value: u64,
///     ) -> Result<(), PostError> {
///         self.num_flags += 1;
///         self.inner.add_flag_lazily(dst, value)
///     }
/// }
/// ```
///
/// An enum of endpoints passes a macro that calls the active variant: `forward_endpoint! { kind => on!(self) }` calls
/// `on!(self, end => end.kind())`.
#[macro_export]
macro_rules! forward_endpoint {
    ($($method:ident),+ $(,)? => $on:ident ! ($this:ident)) => {
        $crate::forward_endpoint!(@each { $this, $on } $($method)+);
    };
    ($($method:ident),+ $(,)? => $this:ident $($inner:tt)+) => {
        $crate::forward_endpoint!(@each { $this, $this $($inner)+ } $($method)+);
    };
    (@each $target:tt $($method:ident)+) => {
        $($crate::forward_endpoint!(@ $method $target);)+
    };

    // The body of a method: a call by the enum's macro, or of a method of the inner endpoint.
    (@call { $this:ident, $on:ident } $method:ident $arguments:tt) => {
        $on!($this, end => end.$method $arguments)
    };
    (@call { $this:ident, $($inner:tt)+ } $method:ident $arguments:tt) => {
        $($inner)+.$method $arguments
    };
    (@call_unsafe { $this:ident, $on:ident } $method:ident $arguments:tt) => {
        // SAFETY: the caller's promise is the one that the inner endpoint asks for.
        $on!($this, end => unsafe { end.$method $arguments })
    };
    (@call_unsafe { $this:ident, $($inner:tt)+ } $method:ident $arguments:tt) => {
        // SAFETY: the caller's promise is the one that the inner endpoint asks for.
        unsafe { $($inner)+.$method $arguments }
    };

    (@kind { $this:ident, $($inner:tt)+ }) => {
        fn kind(&$this) -> $crate::endpoint::TransportKind {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } kind ())
        }
    };
    (@register { $this:ident, $($inner:tt)+ }) => {
        fn register(
            &mut $this,
            region: &$crate::region::Region,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } register (region))
        }
    };
    (@direct { $this:ident, $($inner:tt)+ }) => {
        fn direct(&$this, key: Self::RemoteKey) -> ::core::option::Option<::core::ptr::NonNull<u8>> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } direct (key))
        }
    };
    (@put { $this:ident, $($inner:tt)+ }) => {
        unsafe fn put(
            &mut $this,
            dst: $crate::region::RemoteRange<Self::RemoteKey>,
            src: $crate::region::LocalRange,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call_unsafe { $this, $($inner)+ } put (dst, src))
        }
    };
    (@get { $this:ident, $($inner:tt)+ }) => {
        unsafe fn get(
            &mut $this,
            dst: $crate::region::LocalRange,
            src: $crate::region::RemoteRange<Self::RemoteKey>,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call_unsafe { $this, $($inner)+ } get (dst, src))
        }
    };
    (@add_flag { $this:ident, $($inner:tt)+ }) => {
        fn add_flag(
            &mut $this,
            dst: $crate::region::RemoteRange<Self::RemoteKey>,
            value: u64,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } add_flag (dst, value))
        }
    };
    (@fence { $this:ident, $($inner:tt)+ }) => {
        fn fence(&mut $this) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } fence ())
        }
    };
    (@quiet { $this:ident, $($inner:tt)+ }) => {
        fn quiet(
            &mut $this,
            deadline: ::std::time::Instant,
        ) -> ::core::result::Result<(), $crate::endpoint::QuietError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } quiet (deadline))
        }
    };
    (@wake { $this:ident, $($inner:tt)+ }) => {
        fn wake(
            &mut $this,
            key: Self::RemoteKey,
            waiting_offset: usize,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } wake (key, waiting_offset))
        }
    };
    (@wait_fd { $this:ident, $($inner:tt)+ }) => {
        fn wait_fd(&$this) -> ::core::option::Option<::std::os::fd::BorrowedFd<'_>> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } wait_fd ())
        }
    };

    (@begin_batch { $this:ident, $($inner:tt)+ }) => {
        fn begin_batch(&mut $this) {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } begin_batch ())
        }
    };
    (@flush { $this:ident, $($inner:tt)+ }) => {
        fn flush(&mut $this) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } flush ())
        }
    };

    (@driver { $this:ident, $($inner:tt)+ }) => {
        fn driver(
            &$this,
        ) -> ::core::option::Option<::std::sync::Arc<dyn $crate::wait::Driver>> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } driver ())
        }
    };
    (@health { $this:ident, $($inner:tt)+ }) => {
        fn health(&$this) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } health ())
        }
    };
    (@add_flag_lazily { $this:ident, $($inner:tt)+ }) => {
        fn add_flag_lazily(
            &mut $this,
            dst: $crate::region::RemoteRange<Self::RemoteKey>,
            value: u64,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } add_flag_lazily (dst, value))
        }
    };
    (@has_room { $this:ident, $($inner:tt)+ }) => {
        fn has_room(&mut $this) -> bool {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } has_room ())
        }
    };
    (@has_room_to_spare { $this:ident, $($inner:tt)+ }) => {
        fn has_room_to_spare(&mut $this) -> bool {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } has_room_to_spare ())
        }
    };
    (@try_fence { $this:ident, $($inner:tt)+ }) => {
        fn try_fence(&mut $this) -> ::core::result::Result<bool, $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } try_fence ())
        }
    };
    (@is_settled { $this:ident, $($inner:tt)+ }) => {
        fn is_settled(&mut $this) -> ::core::result::Result<bool, $crate::endpoint::PostError> {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } is_settled ())
        }
    };
    (@marks { $this:ident, $($inner:tt)+ }) => {
        fn marks(
            &mut $this,
        ) -> ::core::result::Result<
            ::core::option::Option<$crate::endpoint::Marks>,
            $crate::endpoint::PostError,
        > {
            $crate::forward_endpoint!(@call { $this, $($inner)+ } marks ())
        }
    };
}

/// Implements [`Batch`](crate::endpoint::Batch) for a transport that posts every operation at once: a batch changes
/// nothing.
#[macro_export]
macro_rules! unbatched {
    ($endpoint:ty) => {
        impl $crate::endpoint::Batch for $endpoint {
            fn begin_batch(&mut self) {}

            fn flush(&mut self) -> ::core::result::Result<(), $crate::endpoint::PostError> {
                ::core::result::Result::Ok(())
            }
        }
    };
}

/// Implements [`Progress`](crate::endpoint::Progress) for a transport that needs no driver, whose calls report every
/// failure, and whose posts never wait for the peer's process. Every method has the answer of
/// [`default_progress!`](crate::default_progress).
#[macro_export]
macro_rules! immediate_progress {
    ($endpoint:ty) => {
        impl $crate::endpoint::Progress for $endpoint {
            $crate::default_progress! {
                driver, health, add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled, marks
            }
        }
    };
}

/// Implements the named methods of [`Progress`](crate::endpoint::Progress), inside an `impl` block, with the answer of
/// a transport that has nothing to tell:
///
/// | method | answer |
/// |---|---|
/// | `driver` | `None` |
/// | `health` | `Ok(())` |
/// | `add_flag_lazily` | [`add_flag`](crate::endpoint::Endpoint::add_flag) |
/// | `has_room`, `has_room_to_spare` | `true` |
/// | `try_fence` | [`fence`](crate::endpoint::Endpoint::fence), then `true` |
/// | `is_settled` | true if [`quiet`](crate::endpoint::Endpoint::quiet) succeeds without a wait |
/// | `marks` | `None` |
#[macro_export]
macro_rules! default_progress {
    ($($method:ident),+ $(,)?) => {
        $($crate::default_progress!(@ $method);)+
    };
    (@driver) => {
        fn driver(
            &self,
        ) -> ::core::option::Option<::std::sync::Arc<dyn $crate::wait::Driver>> {
            ::core::option::Option::None
        }
    };
    (@health) => {
        fn health(&self) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            ::core::result::Result::Ok(())
        }
    };
    (@add_flag_lazily) => {
        fn add_flag_lazily(
            &mut self,
            dst: $crate::region::RemoteRange<Self::RemoteKey>,
            value: u64,
        ) -> ::core::result::Result<(), $crate::endpoint::PostError> {
            $crate::endpoint::Endpoint::add_flag(self, dst, value)
        }
    };
    (@has_room) => {
        fn has_room(&mut self) -> bool {
            true
        }
    };
    (@has_room_to_spare) => {
        fn has_room_to_spare(&mut self) -> bool {
            true
        }
    };
    (@try_fence) => {
        fn try_fence(&mut self) -> ::core::result::Result<bool, $crate::endpoint::PostError> {
            $crate::endpoint::Endpoint::fence(self).map(|()| true)
        }
    };
    (@is_settled) => {
        fn is_settled(&mut self) -> ::core::result::Result<bool, $crate::endpoint::PostError> {
            match $crate::endpoint::Endpoint::quiet(self, ::std::time::Instant::now()) {
                ::core::result::Result::Ok(()) => ::core::result::Result::Ok(true),
                ::core::result::Result::Err($crate::endpoint::QuietError::Deadline { .. }) => {
                    ::core::result::Result::Ok(false)
                }
                ::core::result::Result::Err($crate::endpoint::QuietError::Post(error)) => {
                    ::core::result::Result::Err(error)
                }
            }
        }
    };
    (@marks) => {
        fn marks(
            &mut self,
        ) -> ::core::result::Result<
            ::core::option::Option<$crate::endpoint::Marks>,
            $crate::endpoint::PostError,
        > {
            ::core::result::Result::Ok(::core::option::Option::None)
        }
    };
}
