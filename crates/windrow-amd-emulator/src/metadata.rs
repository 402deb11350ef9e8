//! The metadata of code objects: MessagePack.

use crate::Fault;
use std::ops::Index;

/// The contents of a file; numbers are not negative.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Nothing,
    Number(u64),
    Text(String),
    List(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

impl Value {
    #[must_use]
    pub fn number(&self) -> u64 {
        if let Value::Number(n) = self { *n } else { 0 }
    }

    #[must_use]
    pub fn text(&self) -> &str {
        if let Value::Text(text) = self { text } else { "" }
    }

    #[must_use]
    pub fn list(&self) -> &[Value] {
        if let Value::List(list) = self { list } else { &[] }
    }
}

/// The entry of a map; [`Value::Nothing`] where there is none.
impl Index<&str> for Value {
    type Output = Value;

    fn index(&self, key: &str) -> &Value {
        let Value::Map(entries) = self else { return &Value::Nothing };
        entries.iter().find(|(k, _)| k.text() == key).map_or(&Value::Nothing, |(_, v)| v)
    }
}

/// The value that `bytes` start with.
///
/// # Errors
/// If they are cut, or have a type that metadata do not use.
pub fn read(bytes: &[u8]) -> Result<Value, Fault> {
    value(&mut { bytes })
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], Fault> {
    let (taken, rest) =
        bytes.split_at_checked(count).ok_or_else(|| Fault::new("metadata that are cut"))?;
    *bytes = rest;
    Ok(taken)
}

fn number(bytes: &mut &[u8], count: usize) -> Result<u64, Fault> {
    Ok(take(bytes, count)?.iter().fold(0, |n, &b| n << 8 | u64::from(b)))
}

fn value(bytes: &mut &[u8]) -> Result<Value, Fault> {
    let head = take(bytes, 1)?[0];
    Ok(match head {
        0x00..=0x7f => Value::Number(head.into()),
        0x80..=0x8f => map(bytes, head as usize & 15)?,
        0x90..=0x9f => list(bytes, head as usize & 15)?,
        0xa0..=0xbf => text(bytes, head as usize & 31)?,
        0xc0 => Value::Nothing,
        0xc2 | 0xc3 => Value::Number((head & 1).into()),
        0xcc..=0xcf => Value::Number(number(bytes, 1 << (head - 0xcc))?),
        0xd9..=0xdb => {
            let count = number(bytes, 1 << (head - 0xd9))? as usize;
            text(bytes, count)?
        }
        0xdc | 0xdd => {
            let count = number(bytes, 2 << (head - 0xdc))? as usize;
            list(bytes, count)?
        }
        0xde | 0xdf => {
            let count = number(bytes, 2 << (head - 0xde))? as usize;
            map(bytes, count)?
        }
        _ => return Err(Fault::new(format!("metadata of type {head:#x}"))),
    })
}

fn text(bytes: &mut &[u8], count: usize) -> Result<Value, Fault> {
    Ok(Value::Text(String::from_utf8_lossy(take(bytes, count)?).into_owned()))
}

fn list(bytes: &mut &[u8], count: usize) -> Result<Value, Fault> {
    (0..count).map(|_| value(bytes)).collect::<Result<_, _>>().map(Value::List)
}

fn map(bytes: &mut &[u8], count: usize) -> Result<Value, Fault> {
    let entries = (0..count).map(|_| Ok((value(bytes)?, value(bytes)?)));
    entries.collect::<Result<_, _>>().map(Value::Map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read() {
        let bytes = b"\x82\xa1a\x93\x05\xcd\x01\x02\xc3\xd9\x01b\xdc\x00\x01\xc0";
        let map = read(bytes).unwrap();
        let numbers: Vec<_> = map["a"].list().iter().map(Value::number).collect();
        assert_eq!(numbers, [5, 0x102, 1]);
        assert_eq!(map["b"].list(), [Value::Nothing]);
        assert_eq!(map["c"], Value::Nothing);
    }

    #[test]
    fn damaged_metadata_are_an_error() {
        let bytes = b"\x81\xa1a\xcd\x01\x02";
        assert!((0..bytes.len()).all(|end| read(&bytes[..end]).is_err()));
        assert!(read(b"\xca").is_err());
    }
}
