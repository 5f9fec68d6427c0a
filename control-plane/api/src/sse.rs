//! Incremental parser of a server-sent event stream, with a limit on the size of one event.
//!
//! Sans-I/O: bytes in, events out. The parser accepts LF, CRLF and CR line ends across any split of the
//! input. The limit bounds the memory used, whatever the peer sends.

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SseEvent {
    /// The `event` field, empty if absent.
    pub(crate) kind: String,
    /// The `data` fields, joined by line feeds.
    pub(crate) data: Vec<u8>,
}

/// An event or a line exceeds the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {limit_bytes} bytes")]
pub(crate) struct EventTooLarge {
    pub(crate) limit_bytes: usize,
}

/// State between two pieces of input.
#[derive(Debug)]
pub(crate) struct SseParser {
    limit_bytes: usize,
    line: Vec<u8>,
    event: SseEvent,
    has_data: bool,
    after_cr: bool,
    at_start: bool,
}

impl SseParser {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            line: Vec::new(),
            event: SseEvent::default(),
            has_data: false,
            after_cr: false,
            at_start: true,
        }
    }

    /// Takes a piece of input and appends the events that it completes.
    pub(crate) fn push(
        &mut self,
        mut input: &[u8],
        events: &mut Vec<SseEvent>,
    ) -> Result<(), EventTooLarge> {
        if self.after_cr && !input.is_empty() {
            self.after_cr = false;
            input = input.strip_prefix(b"\n").unwrap_or(input);
        }
        while let Some(end) = input.iter().position(|&byte| byte == b'\n' || byte == b'\r') {
            self.extend_line(&input[..end])?;
            let was_cr = input[end] == b'\r';
            input = &input[end + 1..];
            if was_cr {
                if input.is_empty() {
                    self.after_cr = true;
                }
                input = input.strip_prefix(b"\n").unwrap_or(input);
            }
            self.end_line(events);
        }
        self.extend_line(input)
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), EventTooLarge> {
        if self.line.len() + self.event.data.len() + bytes.len() > self.limit_bytes {
            return Err(EventTooLarge { limit_bytes: self.limit_bytes });
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self, events: &mut Vec<SseEvent>) {
        let mut line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.at_start) && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                events.push(std::mem::take(&mut self.event));
            } else {
                self.event = SseEvent::default();
            }
            return;
        }
        let (field, value) = match line.iter().position(|&byte| byte == b':') {
            Some(colon) => (&line[..colon], &line[colon + 1..]),
            None => (line.as_slice(), &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"event" => self.event.kind = String::from_utf8_lossy(value).into_owned(),
            b"data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.event.data.push(b'\n');
                }
                self.event.data.extend_from_slice(value);
            }
            // Comments (empty field name), `id`, `retry` and unknown fields.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: &[&[u8]]) -> Vec<SseEvent> {
        let mut parser = SseParser::new(1 << 20);
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, &mut events).unwrap();
        }
        events
    }

    fn event(kind: &str, data: &str) -> SseEvent {
        SseEvent { kind: kind.to_owned(), data: data.as_bytes().to_vec() }
    }

    #[test]
    fn reads_fields_comments_and_every_line_end() {
        let text = b"\xef\xbb\xbf: hello\nevent: placement\nid: 7\ndata: {\"a\":\ndata:1}\n\n";
        assert_eq!(parse(&[text]), [event("placement", "{\"a\":\n1}")]);
        let text = b"event:a\r\ndata: 1\r\n\r\nevent: b\rdata: 2\r\rdata\n\n\n\nretry: 5\n\n";
        assert_eq!(parse(&[text]), [event("a", "1"), event("b", "2"), event("", "")]);
    }

    #[test]
    fn every_split_gives_the_same_events() {
        let text = b"event: placement\r\nid: 7\r\ndata: one\r\n\r\n: ping\n\ndata: two\r\r";
        let whole = parse(&[text]);
        assert_eq!(whole, [event("placement", "one"), event("", "two")]);
        for i in 0..=text.len() {
            for j in i..=text.len() {
                assert_eq!(parse(&[&text[..i], &text[i..j], &text[j..]]), whole, "split {i} {j}");
            }
        }
    }

    #[test]
    fn an_endless_line_and_an_endless_event_end_at_the_limit() {
        let mut parser = SseParser::new(1000);
        let mut events = Vec::new();
        let outcome = (0..100).try_for_each(|_| parser.push(&[b'x'; 100], &mut events));
        assert_eq!(outcome, Err(EventTooLarge { limit_bytes: 1000 }));
        let mut parser = SseParser::new(1000);
        let outcome = (0..1000).try_for_each(|_| parser.push(b"data: xxxx\n", &mut events));
        assert_eq!(outcome, Err(EventTooLarge { limit_bytes: 1000 }));
        assert!(events.is_empty());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_neither_panic_nor_outgrow_the_limit(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..30),
        ) {
            let mut parser = SseParser::new(300);
            let mut events = Vec::new();
            for piece in &pieces {
                if parser.push(piece, &mut events).is_err() {
                    break;
                }
            }
            prop_assert!(parser.line.len() + parser.event.data.len() <= 300 + 30);
            prop_assert!(events.iter().all(|event| event.data.len() <= 330));
        }
    }
}
