use std::fmt;
use std::str::FromStr;

use crate::{proto, Error};

/// A point in the stream: all entries up to and including `seq` are applied. It is only valid for a subscription with the
/// same filter. Its text is `EPOCH:SEQ`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// The random name of the journal's history. Empty means the server's current epoch; a subscription then cannot
    /// detect that the server has lost its journal.
    pub epoch: String,
    /// The number of the last entry applied; 0 is before the first entry.
    pub seq: u64,
}

impl Position {
    /// Returns a position.
    pub fn new(epoch: impl Into<String>, seq: u64) -> Self {
        Self { epoch: epoch.into(), seq }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.seq)
    }
}

impl FromStr for Position {
    type Err = Error;

    /// Parses `EPOCH:SEQ`, or `:SEQ` for an empty epoch. An epoch may contain colons.
    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::config("position", format!("is {text:?}: want EPOCH:SEQ, or :SEQ"));
        let (epoch, seq) = text.rsplit_once(':').ok_or_else(wrong)?;
        if !seq.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong()); // u64 allows a plus
        }
        Ok(Self::new(epoch, seq.parse().map_err(|_| wrong())?))
    }
}

impl From<proto::Position> for Position {
    fn from(p: proto::Position) -> Self {
        Self { epoch: p.epoch, seq: p.seq }
    }
}

impl From<Position> for proto::Position {
    fn from(p: Position) -> Self {
        Self { epoch: p.epoch, seq: p.seq }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text() {
        for (text, epoch, seq) in [("e:5", "e", 5), (":0", "", 0), ("a:b:7", "a:b", 7), ("e:18446744073709551615", "e", u64::MAX)]
        {
            let p: Position = text.parse().unwrap();
            assert_eq!(p, Position::new(epoch, seq));
            assert_eq!(p.to_string(), text);
        }
        for text in ["", "e", "e:", "5", "e:-1", "e:+1", "e:1x", "e: 1", "e:18446744073709551616"] {
            assert!(text.parse::<Position>().is_err(), "{text}");
        }
    }
}
